// A row of bf16 becomes fp8 with a scale per 32 columns, behind an RMS norm or as it is.
#pragma once
#include "common.cuh"

// One warp: `row` has `pieces` pieces of 8 columns (a multiple of 4, at most 32 PER_LANE). `norm`: float32 per column.
// Codes go to fragments whose 128-byte pieces of 16 columns lie PIECE bytes apart, from `codes` (at the row's 16 bytes
// of piece 0); scales to `scales` + 8 * group. Warps `part` of PARTS share a row: each sums all of it, so that the bits
// do not depend on PARTS, and writes its share.
template <bool NORM, int PER_LANE, int PIECE, int PARTS>
DEVICE void quantize_row(const bf16* row, int pieces, const float* norm, float eps, int part, u8* codes, u8* scales) {
  uint4 raw[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int piece = i * 32 + lane_id();
    raw[i] = piece < pieces ? load_l2((const uint4*)row + piece) : make_uint4(0, 0, 0, 0);
  }
  float inverse_rms = 1.0f;
  if constexpr (NORM) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum = fmaf(bf16x2_low(words[j]), bf16x2_low(words[j]), sum);
        sum = fmaf(bf16x2_high(words[j]), bf16x2_high(words[j]), sum);
      }
    }
    inverse_rms = 1.0f / sqrtf(warp_sum(sum) / (float)(8 * pieces) + eps);
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (i % PARTS != part) continue;
    int piece = i * 32 + lane_id();
    bool inside = piece < pieces;
    float x[8] = {bf16x2_low(raw[i].x), bf16x2_high(raw[i].x), bf16x2_low(raw[i].y), bf16x2_high(raw[i].y),
                  bf16x2_low(raw[i].z), bf16x2_high(raw[i].z), bf16x2_low(raw[i].w), bf16x2_high(raw[i].w)};
    if constexpr (NORM) {
      const float4* w = (const float4*)norm + 2 * (inside ? piece : 0);
      float4 first = w[0], second = w[1];
      float weights[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = round_bf16(weights[j] * x[j] * inverse_rms);
    }
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(x[j]));
    amax = fmaxf(amax, shuffle_xor(amax, 1));
    amax = fmaxf(amax, shuffle_xor(amax, 2));
    u32 code = fp8_scale_code(amax);
    float inverse = ue8m0_inverse(code);
    u32 words[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      words[j] = (u32)f32x2_to_e4m3x2(x[4 * j] * inverse, x[4 * j + 1] * inverse) |
                 (u32)f32x2_to_e4m3x2(x[4 * j + 2] * inverse, x[4 * j + 3] * inverse) << 16;
    if (!inside) continue;
    *(uint2*)(codes + (piece >> 1) * PIECE + (piece & 1) * 8) = make_uint2(words[0], words[1]);
    if ((piece & 3) == 0) scales[(piece >> 2) * 8] = (u8)code;
  }
}
