// bf16 rows into fp8 fragments, by itself or behind an RMS norm: for more rows than a product takes in its prologue.
//
// Compiled with COLUMNS, X_STRIDE, NORM, EPS.
#include "dense/norm.cuh"

constexpr int GROUPS = COLUMNS / 32;
constexpr int COUNT = (GROUPS + 7) / 8;  // groups of a warp, where a block has the whole row
constexpr int PARTS = COUNT;             // blocks of 8 rows; with a norm each reads all of them

KERNEL(quantize, Quantize, 256, 1) {
  launch_dependents();
  int tile = (int)blockIdx.x / PARTS, part = (int)blockIdx.x % PARTS;
  int rows = min(8, p.rows - tile * 8);
  const bf16* x = p.x + (i64)tile * 8 * X_STRIDE;
  u8* codes = p.codes + (i64)tile * GROUPS * 256;
  u8* scales = p.scales + (i64)tile * GROUPS * 8;
  auto store = [&](int group, int row, int quarter, uint2 words, u32 code) {
    *(uint2*)(codes + codes_offset(group, row, quarter)) = words;
    if (quarter == 0) scales[group * 8 + row] = (u8)code;
  };
  wait_for_dependencies();
  if constexpr (NORM) {
    quantize_rows<true, COUNT, PARTS>(x, X_STRIDE, GROUPS, rows, p.norm, EPS, part, (float*)shared_memory(), store);
  } else {  // a block has 8 groups of its own
    codes += part * 8 * 256, scales += part * 8 * 8;
    quantize_rows<false, 1, 1>(x + part * 256, X_STRIDE, min(8, GROUPS - part * 8), rows, nullptr, 0.0f, 0, nullptr,
                               store);
  }
}
