// Operands of a skinny product by mma.sync: how a lane decodes 16 x 32 weights and 8 x 32 activations, and multiplies.
//
// K runs in groups of 32 columns, the groups of the fp8 scales. A lane with r = lane / 4, q = lane % 4 holds the parts
// of mma.m16n8k16 that belong to output rows r, r + 8 and to activation row r. Both operands may order the columns of
// a group as they like as long as they agree: an fp8 unit gives a lane the columns 4 q .. 4 q + 3 of a half group, so
// the first product takes {4q, 4q + 1} and {4q + 2, 4q + 3} where the instruction says {2q, 2q + 1} and {2q + 8, ..}.
//
// Compiled with COLUMNS.
#pragma once
#include "common.cuh"

constexpr int FP8 = 0;          // e4m3 weights, scale per 32 x 32; e4m3 activations, scale per row and 32 columns
constexpr int FP8_AT_BF16 = 1;  // the same weights, decoded to bf16; bf16 activations
constexpr int BF16 = 2;         // bf16 weights and activations

constexpr int GROUPS = (COLUMNS + 31) / 32;
constexpr int PACKED_GROUPS = (GROUPS + 3) / 4 * 4;  // of an fp8 tile: its scales fill whole 16 bytes

// A packed tile of 16 rows: units of all groups, then (fp8) a float32 scale per group.
DEVICE constexpr int unit_bytes(int kind) { return kind == BF16 ? 1024 : 512; }
DEVICE constexpr int group_bytes(int kind) { return kind == BF16 ? 1024 : 516; }
DEVICE constexpr int packed_groups(int kind) { return kind == BF16 ? GROUPS : PACKED_GROUPS; }
DEVICE constexpr int fragment_bytes(int kind) { return kind == FP8 ? 256 : 512; }  // 8 activation rows of a group

struct Halves { u16 low, high; };
// A word in two without a shift: a conversion reads either half of a register.
DEVICE Halves halves(u32 word) {
  union { u32 word; Halves halves; } u;
  u.word = word;
  return u.halves;
}

struct Activations {  // of a lane: 8 rows, one group, as stored
  u32 word[4];        // FP8: two
  u32 scales;         // FP8: UE8M0 codes of rows 2 q and 2 q + 1
};

// Offset of a lane inside the fragment of a group.
template <int KIND> DEVICE int lane_offset() {
  int lane = lane_id();
  return KIND == FP8_AT_BF16 ? (lane & 2) * 64 + (lane >> 2) * 16 + (lane & 1) * 8 : lane * 4;
}

// `fragment` is at the lane's offset in the fragment of a group. FROM_L2: written by an earlier kernel; otherwise it is
// in shared memory.
template <int KIND, bool FROM_L2> DEVICE void load_activations(Activations& x, const u8* fragment) {
  if constexpr (KIND == FP8_AT_BF16) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2* at = (const uint2*)(fragment + half * 256);
      uint2 pair = FROM_L2 ? load_l2(at) : *at;
      x.word[2 * half] = pair.x;
      x.word[2 * half + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < (KIND == FP8 ? 2 : 4); ++i) {
      const u32* at = (const u32*)(fragment + i * 128);
      x.word[i] = FROM_L2 ? load_l2(at) : *at;
    }
  }
}
// `scales` is at the lane's offset in the codes [8] of a group: the two rows of its accumulators, not of its operand.
DEVICE int scales_offset() { return 2 * (lane_id() & 3); }
template <int KIND, bool FROM_L2> DEVICE void load_scales(Activations& x, const u8* scales) {
  if constexpr (KIND == FP8) {
    const u16* at = (const u16*)scales;
    x.scales = FROM_L2 ? load_l2(at) : *at;
  }
}

struct Columns {  // a lane's B operands of two products, and the scales of its accumulators' columns
  u32 b[4];
  float scale[2];
};

template <int KIND> DEVICE void decode_activations(Columns& c, const Activations& x) {
  if constexpr (KIND == FP8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Halves h = halves(x.word[i]);
      c.b[2 * i] = e4m3x2_to_f16x2(h.low);
      c.b[2 * i + 1] = e4m3x2_to_f16x2(h.high);
    }
    // Codes of activations are above 0 (fp8_scale_code), so a shift decodes them.
    c.scale[0] = as_float((x.scales & 255u) << 23);
    c.scale[1] = as_float((x.scales >> 8) << 23);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) c.b[i] = x.word[i];
  }
}

// The two low or high codes of a word, times a pair of powers of two, as a bf16 pair: exact, since bf16 has the range of
// float32.
template <bool HIGH> DEVICE u32 scaled_bf16x2(u32 word, u32 scales) {
  u32 spread = permute_bytes(word, 0, HIGH ? 0x3424 : 0x1404);  // as e4m3x2_to_bf16x2
  u32 bits = (spread & 0x80008000u) | ((spread >> 4) & 0x07F007F0u);
  return multiply_bf16x2(multiply_bf16x2(bits, 0x7B807B80u), scales);
}

struct Operand {  // a lane's A operands of two products: a unit, decoded
  u32 a[8];
};

// A lane's part of a unit, as stored (`second`: of bf16) and decoded. FP8_AT_BF16: `scale` is multiplied in.
struct Unit { uint4 first, second; };
template <int KIND> DEVICE void stream_unit(Unit& unit, const u8* at) {  // from global memory; `at`: the lane's
  unit.first = load_stream(at);
  if constexpr (KIND == BF16) unit.second = load_stream(at + 512);
}
template <int KIND> DEVICE void read_unit(Unit& unit, const u8* at) {  // from shared memory
  unit.first = *(const uint4*)at;
  if constexpr (KIND == BF16) unit.second = *(const uint4*)(at + 512);
}
template <int KIND> DEVICE void decode_unit(Operand& w, const Unit& unit, float scale) {
  u32 words[4] = {unit.first.x, unit.first.y, unit.first.z, unit.first.w};
  if constexpr (KIND == BF16) {
    u32 others[4] = {unit.second.x, unit.second.y, unit.second.z, unit.second.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) w.a[i] = words[i], w.a[4 + i] = others[i];
  } else {  // words: rows r, r + 8 of the first half group, then of the second
    u32 scales = KIND == FP8 ? 0 : f32x2_to_bf16x2(scale, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int to = (i >> 1) * 4 + (i & 1);
      Halves h = halves(words[i]);
      w.a[to] = KIND == FP8 ? e4m3x2_to_f16x2(h.low) : scaled_bf16x2<false>(words[i], scales);
      w.a[to + 2] = KIND == FP8 ? e4m3x2_to_f16x2(h.high) : scaled_bf16x2<true>(words[i], scales);
    }
  }
}

// acc += weights x activations of a group. FP8: the scales are not in the operands, so a group has accumulators of its
// own; f16 products of e4m3 values are exact, and the sum is rounded as float32 sums are.
template <int KIND> DEVICE void multiply(float (&acc)[4], const Operand& w, float scale, const Columns& x) {
  if constexpr (KIND == FP8) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_f16(d, w.a[0], w.a[1], w.a[2], w.a[3], x.b[0], x.b[1]);
    mma_f16(d, w.a[4], w.a[5], w.a[6], w.a[7], x.b[2], x.b[3]);
    float even = scale * x.scale[0], odd = scale * x.scale[1];
    acc[0] = fmaf(d[0], even, acc[0]);
    acc[1] = fmaf(d[1], odd, acc[1]);
    acc[2] = fmaf(d[2], even, acc[2]);
    acc[3] = fmaf(d[3], odd, acc[3]);
  } else {
    mma_bf16(acc, w.a[0], w.a[1], w.a[2], w.a[3], x.b[0], x.b[1]);
    mma_bf16(acc, w.a[4], w.a[5], w.a[6], w.a[7], x.b[2], x.b[3]);
  }
}

// A lane's accumulators into `sums` [8 rows][stride], outputs 0..15 of a tile beside each other. A stride of 4 modulo
// 16 keeps the 32 lanes on different banks.
DEVICE void store_accumulators(float* sums, int stride, const float (&acc)[4]) {
  float* at = sums + 2 * (lane_id() & 3) * stride + (lane_id() >> 2);
  at[0] = acc[0];
  at[stride] = acc[1];
  at[8] = acc[2];
  at[stride + 8] = acc[3];
}
