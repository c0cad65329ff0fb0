// Rows of bf16 become fp8 with a scale per 32 columns, behind an RMS norm or as they are.
#pragma once
#include "common.cuh"

// A warp and 8 rows, of which `rows` are there, the others zeros: COUNT groups of 32 columns of each, the first at `x`
// and `norm`, the next STEP groups on, as far as `count` are there. A lane has 8 columns of row lane % 8, so that a store
// of the warp fills whole fragments. NORM: behind an RMS norm with weights `norm` (float32, at the first group), whose
// sums of squares come with the rows, which makes one trip to L2 of it all: `squares` [rows][SQUARES], one of every group
// of ALL. The STEP warps of a block share them out and meet over `totals` [STEP][8] in shared memory: if every warp of
// every block asked for these few lines, they alone would take 2 us. STEP 1: a warp reads all.
// `store(i, row, quarter, codes, scale)` gets 8 columns of the i-th group; the scale's code is to be written for quarter 0.
template <bool NORM, int COUNT, int STEP, int ALL, int SQUARES, class Store>
DEVICE void quantize_rows(const bf16* x, int stride, int count, int rows, const float* squares, float eps,
                          const float* norm, float* totals, Store store) {
  int row = lane_id() & 7, quarter = lane_id() >> 3;
  uint4 raw[COUNT];
  const uint4* from = (const uint4*)(x + (i64)row * stride) + quarter;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    raw[i] = row < rows && i < count ? load_l2(from + i * STEP * 4) : make_uint4(0, 0, 0, 0);
  float inverse_rms = 1.0f;
  if constexpr (NORM) {
    constexpr int QUADS = (ALL + 3) / 4, READS = (QUADS + 4 * STEP - 1) / (4 * STEP);  // four sums each
    const int part = STEP > 1 ? warp_id() : 0;
    float4 parts[READS];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < READS; ++i) {
      int quad = (i * STEP + part) * 4 + quarter;
      parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row < rows && quad < QUADS) parts[i] = load_l2((const float4*)(squares + row * SQUARES) + quad);
    }
#pragma unroll
    for (int i = 0; i < READS; ++i) {
      int first = ((i * STEP + part) * 4 + quarter) * 4;
      float4 v = parts[i];
      if (ALL % 4 != 0) {  // what fills up the last four is nobody's
        v.y = first + 1 < ALL ? v.y : 0.0f;
        v.z = first + 2 < ALL ? v.z : 0.0f;
        v.w = first + 3 < ALL ? v.w : 0.0f;
      }
      total += (v.x + v.y) + (v.z + v.w);
    }
    total += shuffle_xor(total, 8);
    total += shuffle_xor(total, 16);
    if constexpr (STEP > 1) {
      if (quarter == 0) totals[part * 8 + row] = total;
      sync_block();
      total = 0.0f;
#pragma unroll
      for (int w = 0; w < STEP && w * 4 < QUADS; ++w) total += totals[w * 8 + row];
    }
    inverse_rms = rsqrtf(total * (1.0f / (32 * ALL)) + eps);
  }
  // In steps of all groups: no group waits for another's stores.
  float amax[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    if constexpr (NORM) {
      if (i < count) {
        const float4* w = (const float4*)norm + i * STEP * 8 + quarter * 2;
        float4 first = w[0], second = w[1];
        float weights[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = f32x2_to_bf16x2(weights[2 * j] * bf16x2_low(words[j]) * inverse_rms,
                                     weights[2 * j + 1] * bf16x2_high(words[j]) * inverse_rms);
        raw[i] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    amax[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      amax[i] = fmaxf(amax[i], fmaxf(fabsf(bf16x2_low(words[j])), fabsf(bf16x2_high(words[j]))));
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) amax[i] = fmaxf(amax[i], shuffle_xor(amax[i], 8));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) amax[i] = fmaxf(amax[i], shuffle_xor(amax[i], 16));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (i >= count) continue;
    u32 code = fp8_scale_code(amax[i]), words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w}, codes[2];
    float inverse = ue8m0_inverse(code);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      codes[j] = (u32)f32x2_to_e4m3x2(bf16x2_low(words[2 * j]) * inverse, bf16x2_high(words[2 * j]) * inverse) |
                 (u32)f32x2_to_e4m3x2(bf16x2_low(words[2 * j + 1]) * inverse, bf16x2_high(words[2 * j + 1]) * inverse) << 16;
    store(i, row, quarter, make_uint2(codes[0], codes[1]), code);
  }
}

// Where a store's 8 columns lie in the fragments of a row of tiles.
DEVICE int codes_offset(int group, int row, int quarter) {
  return group * 256 + (quarter >> 1) * 128 + row * 16 + (quarter & 1) * 8;
}
