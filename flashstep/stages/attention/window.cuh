// A row's latent becomes its entry of the window cache: norm, rotation, fp8 round trip, store (section 5).
//
// Included by every kernel that has the latents at hand (`low` = wq_a x | wkv x), so that no launch of its own stands
// between them and attention. Use, in a block of 128 to 512 threads (at least HEAD_DIM / 4):
//
//   WindowConstants constants = window_constants<HEAD_DIM, ROPE>(w);   // before wait_for_dependencies()
//   write_window<HEAD_DIM, ROPE>(w, constants, row, scratch);          // after it, by all threads of the block
#pragma once
#include "common.cuh"

struct WindowWrite {
  const bf16* low;           // [rows][low_stride]; the latent stands in columns low_column..low_column + HEAD_DIM - 1
  int low_stride, low_column;  // multiples of 4
  const bf16* kv_norm;       // [HEAD_DIM]
  float eps;                 // of the norm
  const float* frequencies;  // [ROPE / 2], radians per position
  const i32* row_position;   // [rows]
  const i32* row_slot;       // [rows]; a row whose slot is negative writes nothing
  u8* codes;                 // [slots][ring][HEAD_DIM] e4m3, entry of position p at p % ring
  u8* scales;                // [slots][ring][HEAD_DIM / 32] UE8M0
  int ring;                  // entries of a slot; 0: codes and scales are [rows][..], the entry of a row at its number
};

constexpr int WINDOW_SCRATCH = 64;  // bytes of shared memory, aligned to 16

struct WindowConstants {  // what thread i needs for columns 4 i..4 i + 3 and no kernel of the step writes
  uint2 norm;
  float frequency[2];
};

template <int HEAD_DIM, int ROPE>
DEVICE WindowConstants window_constants(const WindowWrite& w) {
  static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 512 && ROPE % 4 == 0 && ROPE <= HEAD_DIM, "sizes of an entry");
  WindowConstants c;
  c.norm.x = c.norm.y = 0;
  c.frequency[0] = c.frequency[1] = 0.0f;
  int column = 4 * (int)threadIdx.x, turning = column - (HEAD_DIM - ROPE);
  if (column < HEAD_DIM) c.norm = *(const uint2*)(w.kv_norm + column);
  if (column < HEAD_DIM && turning >= 0) {
    c.frequency[0] = w.frequencies[turning / 2];
    c.frequency[1] = w.frequencies[turning / 2 + 1];
  }
  return c;
}

// Sine and cosine of an angle >= 0. Multiples of pi / 2 are taken off in double, exactly up to angles of 3 million: the
// library's sincosf has a slow path for large angles, whose local memory costs even where it is not taken.
DEVICE void sincos_of(float angle, float& sine, float& cosine) {
  double quarters = (double)angle * 0.63661977236758134 + 6755399441055744.0;  // 1.5 * 2^52: rounds to an integer
  quarters -= 6755399441055744.0;
  // pi / 2 as a number of 32 bits, and the rest.
  float x = (float)(((double)angle - quarters * 1.5707963267341256) - quarters * 6.0771005065061922e-11), xx = x * x;
  float s = x + x * xx * (-0.16666654611f + xx * (8.3321608736e-3f + xx * -1.9515295891e-4f));
  float c = xx * xx * (4.166664568298827e-2f + xx * (-1.388731625493765e-3f + xx * 2.443315711809948e-5f));
  c = 1.0f - 0.5f * xx + c;
  int quarter = (int)(i64)quarters & 3;
  sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
  if (quarter & 2) sine = -sine;
  if ((quarter + 1) & 2) cosine = -cosine;
}

// A pair of bf16 turned by the angle whose sine and cosine are given, rounded to bf16.
DEVICE u32 rotate_pair(u32 pair, float sine, float cosine) {
  float x = bf16x2_low(pair), y = bf16x2_high(pair);
  return f32x2_to_bf16x2(x * cosine - y * sine, x * sine + y * cosine);
}

// `scratch`: WINDOW_SCRATCH bytes, free again behind the next sync_block of the caller.
template <int HEAD_DIM, int ROPE>
DEVICE void write_window(const WindowWrite& w, const WindowConstants& c, int row, u8* scratch) {
  constexpr int WARPS = (HEAD_DIM + 127) / 128;  // that hold columns, four a thread
  float* sums = (float*)scratch;
  int slot = load_l2(w.row_slot + row);
  if (slot < 0) return;  // the same for all threads of the block
  int position = load_l2(w.row_position + row);
  int column = 4 * (int)threadIdx.x, turning = column - (HEAD_DIM - ROPE);
  bool holds = column < HEAD_DIM;

  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (holds) {
    uint2 packed = load_l2((const uint2*)(w.low + (i64)row * w.low_stride + w.low_column + column));
    x[0] = bf16x2_low(packed.x), x[1] = bf16x2_high(packed.x);
    x[2] = bf16x2_low(packed.y), x[3] = bf16x2_high(packed.y);
  }
  float sine[2] = {0.0f, 0.0f}, cosine[2] = {1.0f, 1.0f};
  if (holds && turning >= 0) {  // while the latent is on its way
    sincos_of((float)position * c.frequency[0], sine[0], cosine[0]);
    sincos_of((float)position * c.frequency[1], sine[1], cosine[1]);
  }
  float sum = warp_sum((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]));
  if (warp_id() < WARPS && lane_id() == 0) sums[warp_id()] = sum;
  sync_block();
  if (warp_id() >= WARPS) return;
  sum = sums[0];
#pragma unroll
  for (int i = 1; i < WARPS; i++) sum += sums[i];
  float inverse = 1.0f / sqrtf(sum * (1.0f / HEAD_DIM) + w.eps);

  u32 low = f32x2_to_bf16x2(bf16x2_low(c.norm.x) * x[0] * inverse, bf16x2_high(c.norm.x) * x[1] * inverse);
  u32 high = f32x2_to_bf16x2(bf16x2_low(c.norm.y) * x[2] * inverse, bf16x2_high(c.norm.y) * x[3] * inverse);
  if (holds && turning >= 0) {
    low = rotate_pair(low, sine[0], cosine[0]);
    high = rotate_pair(high, sine[1], cosine[1]);
  }
  x[0] = bf16x2_low(low), x[1] = bf16x2_high(low), x[2] = bf16x2_low(high), x[3] = bf16x2_high(high);

  float amax = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
  for (int m = 1; m < 8; m <<= 1) amax = fmaxf(amax, shuffle_xor(amax, m));  // 8 threads share a scale
  u32 scale = fp8_scale_code(amax);
  float to_code = ue8m0_inverse(scale);
  u32 codes = (u32)f32x2_to_e4m3x2(x[0] * to_code, x[1] * to_code) |
              (u32)f32x2_to_e4m3x2(x[2] * to_code, x[3] * to_code) << 16;
  i64 entry = w.ring ? (i64)slot * w.ring + position % w.ring : (i64)row;
  if (holds) {
    *(u32*)(w.codes + entry * HEAD_DIM + column) = codes;
    if (column % 32 == 0) w.scales[entry * (HEAD_DIM / 32) + column / 32] = (u8)scale;
  }
}
