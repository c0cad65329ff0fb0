// bf16 rows into fp8 fragments, by themselves or behind an RMS norm: for more rows than a product takes in its prologue.
// A warp per 8 rows and group of 32 columns.
//
// Compiled with COLUMNS, X_STRIDE, NORM, SQUARES, EPS.
#pragma once
#include "dense/norm.cuh"

constexpr int GROUPS = COLUMNS / 32;
constexpr int PARTS = (GROUPS + 7) / 8;  // blocks of 8 rows

// Blocks 0 .. PARTS (rows / 8) - 1, of 8 warps.
template <class P> DEVICE void quantize_block(const P& p, int block, u8* shared) {
  float* norm = (float*)shared;  // of the block's 8 groups
  int tile = block / PARTS, first = block % PARTS * 8, warp = warp_id();
  if (NORM && first * 32 + (int)threadIdx.x < COLUMNS) norm[threadIdx.x] = p.norm[first * 32 + threadIdx.x];
  sync_block();
  u8* codes = p.codes + ((i64)tile * GROUPS + first) * 256;
  u8* scales = p.scales + ((i64)tile * GROUPS + first) * 8;
  auto store = [&](int, int row, int quarter, uint2 words, u32 code) {
    if (tile * 8 + row >= p.rows) return;
    *(uint2*)(codes + codes_offset(warp, row, quarter)) = words;
    if (quarter == 0) scales[warp * 8 + row] = (u8)code;
  };
  wait_for_dependencies();
  if (first + warp >= GROUPS) return;
  quantize_rows<NORM, 1, 1, GROUPS, SQUARES>(p.x + (i64)tile * 8 * X_STRIDE + (first + warp) * 32, X_STRIDE, 1,
                                             p.rows - tile * 8, p.squares + tile * 8 * SQUARES, EPS, norm + warp * 32,
                                             nullptr, store);
}
