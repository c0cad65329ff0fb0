// Rows of bf16 become fp8 with a scale per 32 columns, behind an RMS norm or as they are.
#pragma once
#include "common.cuh"

// bf16(x) as float32, without a shift: the other half of the pair is zero.
DEVICE float rounded(float x) { return as_float(f32x2_to_bf16x2(0.0f, x)); }

// A block of 8 warps and up to 8 rows of `groups` groups of 32 columns, `stride` apart. A warp takes group w of every 8
// groups, COUNT in all; its lane has 8 columns of row lane % 8, so that a store of the warp fills whole fragments.
// `norm`: float32 per column; `scratch`: 64 floats of shared memory. `store(group, row, quarter, codes, scale)` gets 8
// columns, the scale's code to be written for quarter 0. Groups whose turn in the warp is `part` modulo PARTS are
// stored; all are summed, so that the bits do not depend on PARTS.
template <bool NORM, int COUNT, int PARTS, class Store>
DEVICE void quantize_rows(const bf16* x, int stride, int groups, int rows, const float* norm, float eps, int part,
                          float* scratch, Store store) {
  int warp = warp_id(), row = lane_id() & 7, quarter = lane_id() >> 3;
  uint4 raw[COUNT];
  const uint4* from = (const uint4*)(x + (i64)row * stride + warp * 32) + quarter;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    raw[i] = row < rows && i * 8 + warp < groups ? load_l2(from + i * 32) : make_uint4(0, 0, 0, 0);
  float inverse_rms = 1.0f;
  if constexpr (NORM) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low = fmaf(bf16x2_low(words[j]), bf16x2_low(words[j]), low);
        high = fmaf(bf16x2_high(words[j]), bf16x2_high(words[j]), high);
      }
      sum += low + high;
    }
    sum += shuffle_xor(sum, 8);
    sum += shuffle_xor(sum, 16);
    if (quarter == 0) scratch[warp * 8 + row] = sum;
    sync_block();
    float total = scratch[row];
#pragma unroll
    for (int w = 1; w < 8; ++w) total += scratch[w * 8 + row];
    inverse_rms = rsqrtf(total / (float)(32 * groups) + eps);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    int group = i * 8 + warp;
    if ((PARTS > 1 && i % PARTS != part) || group >= groups) continue;
    float v[8] = {bf16x2_low(raw[i].x), bf16x2_high(raw[i].x), bf16x2_low(raw[i].y), bf16x2_high(raw[i].y),
                  bf16x2_low(raw[i].z), bf16x2_high(raw[i].z), bf16x2_low(raw[i].w), bf16x2_high(raw[i].w)};
    if constexpr (NORM) {
      const float4* w = (const float4*)norm + group * 8 + quarter * 2;
      float4 first = w[0], second = w[1];
      float weights[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = rounded(weights[j] * v[j] * inverse_rms);
    }
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(v[j]));
    amax = fmaxf(amax, shuffle_xor(amax, 8));
    amax = fmaxf(amax, shuffle_xor(amax, 16));
    u32 code = fp8_scale_code(amax);
    float inverse = ue8m0_inverse(code);
    u32 words[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      words[j] = (u32)f32x2_to_e4m3x2(v[4 * j] * inverse, v[4 * j + 1] * inverse) |
                 (u32)f32x2_to_e4m3x2(v[4 * j + 2] * inverse, v[4 * j + 3] * inverse) << 16;
    if (row < rows) store(group, row, quarter, make_uint2(words[0], words[1]), code);
  }
}

// Where a store's 8 columns lie in the fragments of a row of tiles.
DEVICE int codes_offset(int group, int row, int quarter) {
  return group * 256 + (quarter >> 1) * 128 + row * 16 + (quarter & 1) * 8;
}
