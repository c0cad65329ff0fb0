// bf16 rows into fp8 fragments, by itself or behind an RMS norm: for more rows than a product takes in its prologue.
//
// Compiled with COLUMNS, X_STRIDE, NORM, EPS.
#include "dense/norm.cuh"

constexpr int PER_LANE = (COLUMNS + 255) / 256;
constexpr int PARTS = NORM ? 2 : PER_LANE;  // warps of a row, on as many blocks: with a norm each reads the whole row

KERNEL(quantize, Quantize, 256, 1) {
  launch_dependents();
  int tile = (int)blockIdx.x / PARTS, part = (int)blockIdx.x % PARTS, row = tile * 8 + warp_id();
  u8* codes = p.codes + (i64)tile * (COLUMNS / 16) * 128 + (row & 7) * 16;
  u8* scales = p.scales + (i64)tile * (COLUMNS / 32) * 8 + (row & 7);
  const bf16* x = p.x + (i64)row * X_STRIDE;
  wait_for_dependencies();
  if (row >= p.rows) return;
  if constexpr (NORM) {
    quantize_row<true, PER_LANE, 128, PARTS>(x, COLUMNS / 8, p.norm, EPS, part, codes, scales);
  } else {  // 256 columns a warp
    int pieces = min(32, COLUMNS / 8 - part * 32);
    codes += part * 16 * 128;
    quantize_row<false, 1, 128, 1>(x + part * 256, pieces, nullptr, 0.0f, 0, codes, scales + part * 64);
  }
}
