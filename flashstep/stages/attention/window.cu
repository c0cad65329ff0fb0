// write_window: entries of several layers at once, for kernels' tests and for what the draft learns of committed rows.
#include "attention/window.cuh"

constexpr int THREADS = 128;

KERNEL(write_window, Window, THREADS, 4) {
  int row = (int)blockIdx.x / LAYERS, layer = (int)blockIdx.x % LAYERS;
  launch_dependents();
  WindowWrite w = {p.low, p.low_stride, p.low_columns[layer], p.kv_norm[layer], p.eps, p.frequencies,
                   p.row_position, p.row_slot, p.codes[layer], p.scales[layer], p.ring};
  WindowConstants constants = window_constants<HEAD_DIM, ROPE>(w);
  wait_for_dependencies();
  write_window<HEAD_DIM, ROPE>(w, constants, row, shared_memory());
}
