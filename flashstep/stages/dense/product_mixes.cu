// Skinny products, and on further blocks the slices of hyper-connection mixes (boundary/mixes.cuh).
#include "boundary/mixes.cuh"
#include "dense/product.cuh"

DEVICE void extra_block(const ProductMixes& p, int slice, u8* shared) {
  if (slice >= p.slices) {
    wait_for_dependencies();
    return;
  }
  Mixes m = {p.stream, p.fn, p.partials, p.slices, p.rows};
  mixes_prefetch(m, slice, shared);
  wait_for_dependencies();
  mixes_slice(m, slice, shared);
}

KERNEL(product_mixes, ProductMixes, WARPS * 32, BLOCKS_PER_SM) { run_product(p); }
