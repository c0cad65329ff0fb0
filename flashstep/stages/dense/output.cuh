// Where the results of a product go: four outputs of a row at a time.
#pragma once
#include "common.cuh"

constexpr int TO_BF16 = 0;       // [rows][stride] bf16
constexpr int TO_F32 = 1;        // [rows][stride] float32
constexpr int TO_PEERS = 2;      // [rows][stride] float32 on each of PEERS devices
constexpr int TO_FRAGMENTS = 3;  // rounded to bf16, then fp8 fragments of `stride` columns and their scales
constexpr int TO_SCORES = 4;     // [rows][stride] float32: a router's scores of the results
constexpr int TO_SQUARED = 5;    // TO_BF16, and the squares of every 32 outputs summed: float32 [rows][SQUARES]

struct Place {
  int form;
  void* out;     // of TO_FRAGMENTS: codes
  u8* scales;    // of TO_FRAGMENTS
  int outputs;   // of the product: columns from here on are padding
  int stride;    // columns of a row of `out`
  int column;    // of the first output in `out`
};

DEVICE void store_f32(float* at, float4 v, int left, bool aligned) {
  if (left >= 4 && aligned) {
    *(float4*)at = v;
    return;
  }
  float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < left) at[i] = values[i];
}

DEVICE constexpr bool takes_groups(int form) { return form == TO_FRAGMENTS || form == TO_SQUARED; }

// Store outputs `output` .. + 3 of `row`. Called by whole warps; `wanted` is false for lanes with nothing to store.
// Of forms that take groups, 8 lanes from a multiple of 8 hold a row's 32 outputs from a multiple of 32, in order.
template <class P> DEVICE void emit(const P& p, const Place& place, bool wanted, int row, int output, float4 v) {
  int left = place.outputs - output, column = place.column + output;
  bool aligned = place.stride % 4 == 0 && place.column % 4 == 0;
  wanted = wanted && left > 0;
  if (place.form == TO_FRAGMENTS) {
    float x[4] = {v.x, v.y, v.z, v.w}, amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = i < left ? round_bf16(x[i]) : 0.0f;
      amax = fmaxf(amax, fabsf(x[i]));
    }
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) amax = fmaxf(amax, shuffle_xor(amax, m));
    u32 code = fp8_scale_code(amax);
    float inverse = ue8m0_inverse(code);
    if (!wanted) return;
    u32 codes = (u32)f32x2_to_e4m3x2(x[0] * inverse, x[1] * inverse) |
                (u32)f32x2_to_e4m3x2(x[2] * inverse, x[3] * inverse) << 16;
    *(u32*)((u8*)place.out + fragment_offset(row, column, place.stride / 16)) = codes;
    if (column % 32 == 0) place.scales[((row >> 3) * (place.stride / 32) + column / 32) * 8 + (row & 7)] = (u8)code;
    return;
  }
  if constexpr (SQUARES > 0) {
    if (place.form == TO_SQUARED) {
      float x[4] = {round_bf16(v.x), round_bf16(v.y), round_bf16(v.z), round_bf16(v.w)};
      float sum = fmaf(x[0], x[0], x[1] * x[1]) + fmaf(x[2], x[2], x[3] * x[3]);
#pragma unroll
      for (int m = 1; m < 8; m <<= 1) sum += shuffle_xor(sum, m);
      if (wanted && output % 32 == 0) p.squares[row * SQUARES + output / 32] = sum;
    }
  }
  if (!wanted) return;
  i64 offset = (i64)row * place.stride + column;
  if (place.form == TO_SCORES)
    v = make_float4(sqrt_softplus(v.x), sqrt_softplus(v.y), sqrt_softplus(v.z), sqrt_softplus(v.w));
  if (place.form == TO_F32 || place.form == TO_SCORES) {
    store_f32((float*)place.out + offset, v, left, aligned);
  } else if (place.form == TO_PEERS) {
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) store_f32(p.peers[peer] + offset, v, left, aligned);
  } else {
    bf16* at = (bf16*)place.out + offset;
    u32 low = f32x2_to_bf16x2(v.x, v.y), high = f32x2_to_bf16x2(v.z, v.w);
    if (left >= 4 && aligned) {
      *(uint2*)at = make_uint2(low, high);
      return;
    }
    u32 pairs[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < left) at[i] = (bf16)(pairs[i >> 1] >> (i & 1) * 16);
  }
}
