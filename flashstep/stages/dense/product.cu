// Skinny products alone (product.cuh).
#include "dense/product.cuh"

// Blocks that fill up the last cluster.
DEVICE void extra_block(const Product&, int, u8*) { wait_for_dependencies(); }

KERNEL(product, Product, WARPS * 32, BLOCKS_PER_SM) { run_product(p); }
