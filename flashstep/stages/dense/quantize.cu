// Quantization alone (quantize.cuh).
#include "dense/quantize.cuh"

KERNEL(quantize, Quantize, 256, 1) {
  launch_dependents();
  quantize_block(p, (int)blockIdx.x, shared_memory());
}
