// Skinny products, and on further blocks the slices of hyper-connection mixes (boundary/mixes.cuh).
#include "boundary/mixes.cuh"
#include "dense/product.cuh"

DEVICE void extra_block(const ProductMixes& p, int block, u8* shared) {
  int blocks = (int)gridDim.x;
  for (int i = 0; i < SEGMENTS; ++i) blocks -= clusters_of(i) * CLUSTER;
  if (block >= p.slices) {
    wait_for_dependencies();
    return;
  }
  Mixes m = {p.stream, p.fn, p.partials, p.slices, p.rows};
  mixes_block(m, block, blocks, shared);
}

KERNEL(product_mixes, ProductMixes, WARPS * 32, BLOCKS_PER_SM) { run_product(p); }
