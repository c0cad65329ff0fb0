// Skinny products, and on one further block a row the entry of the window cache (attention/window.cuh).
#include "attention/window.cuh"
#include "dense/product.cuh"

DEVICE void extra_block(const ProductWindow& p, int row, u8* shared) {
  WindowWrite w = {p.low,       p.low_stride, p.low_column,   p.kv_norm, p.window_eps, p.frequencies,
                   p.row_position, p.row_slot, p.window_codes, p.window_scales, p.ring};
  WindowConstants constants = window_constants<HEAD_DIM, ROPE>(w);
  wait_for_dependencies();
  if (row < p.rows) write_window<HEAD_DIM, ROPE>(w, constants, row, shared);
}

KERNEL(product_window, ProductWindow, WARPS * 32, BLOCKS_PER_SM) { run_product(p); }
