// Quantization (quantize.cuh), and on one further block a row the entry of the window cache (attention/window.cuh).
#include "attention/window.cuh"
#include "dense/quantize.cuh"

KERNEL(quantize_window, QuantizeWindow, 256, 1) {
  launch_dependents();
  int row = (int)blockIdx.x - (p.rows + 7) / 8 * PARTS;
  if (row < 0) {
    quantize_block(p, (int)blockIdx.x, shared_memory());
    return;
  }
  WindowWrite w = {p.low,       p.low_stride, p.low_column,   p.kv_norm, p.window_eps, p.frequencies,
                   p.row_position, p.row_slot, p.window_codes, p.window_scales, p.ring};
  WindowConstants constants = window_constants<HEAD_DIM, ROPE>(w);
  wait_for_dependencies();
  write_window<HEAD_DIM, ROPE>(w, constants, row, shared_memory());
}
