// What the products of experts share: packed weights, products of 64 weight rows with 8 activation rows, SwiGLU, and
// the even split of all products over the blocks with its deterministic repair (stream-K).
//
// Packed weights (`cuda.py` packs): [expert][tile of 64 rows][piece of K][codes | scales]. The codes of a piece are
// units of 16 rows, 512 B each: fp8 32 columns as in common.cuh; fp4 64 columns, lane l = 4 r + q holding four words:
// word 2 g + h carries columns 32 g + 16 h + 4 q + 0..3 of row r in the low nibbles of its bytes and of row r + 8 in
// the high ones, so that one word expands to two registers of either product. Scales: one UE8M0 code per row and 32
// columns, [groups / WORD][64 rows][WORD codes].
// Operand tiles (the 8 rows of a product): codes [K / 16][8][16] e4m3, then float32 scales [K / 32][8].
#pragma once
#include "common.cuh"

// A member function (DEVICE is for free ones).
#ifdef FLASHSTEP_EMULATE
#define METHOD inline
#else
#define METHOD __device__ __forceinline__
#endif

#ifdef HAS_WGMMA
constexpr bool USE_WGMMA = WGMMA;
#else
constexpr bool USE_WGMMA = false;
#endif

// What an expanded fp4 code lacks to its value: bits are moved to where e4m3 or f16 has them, not rebiased.
constexpr float FP4_FACTOR = USE_WGMMA ? 64.0f : 16384.0f;
constexpr int CONSUMERS = WARPGROUPS * 128;  // threads that multiply; one more warp copies

template <bool FP4, int COLUMNS> struct Piece {
  static constexpr int GROUPS = COLUMNS / 32;
  static constexpr int WORD = GROUPS % 4 == 0 ? 4 : GROUPS % 2 == 0 ? 2 : 1;
  static constexpr int CODES = 64 * COLUMNS / (FP4 ? 2 : 1);
  static constexpr int BYTES = CODES + 64 * GROUPS;
};

// ---- products ---------------------------------------------------------------------------------------------------

// The UE8M0 code in byte `i` of `word` as float32. Code 0 counts as 0: the weights it scales are below 2^-124.
DEVICE float scale_of(u32 word, int i) {
  return as_float((i == 3 ? word >> 1 : word << (23 - 8 * i)) & 0x7F800000u);
}

template <int WORD> DEVICE u32 load_scales(const u8* scales, int word, int row) {
  const u8* p = scales + (word * 64 + row) * WORD;
  if constexpr (WORD == 4) return *(const u32*)p;
  if constexpr (WORD == 2) return *(const u16*)p;
  return *p;
}

// Even and odd bytes of four e2m1 codes each, as f16: a row's columns (0, 2) and (1, 3).
DEVICE u32 e2m1_to_f16_low_even(u32 w) { return ((w << 12) & 0x80008000u) | ((w << 9) & 0x0E000E00u); }
DEVICE u32 e2m1_to_f16_low_odd(u32 w) { return ((w << 4) & 0x80008000u) | ((w << 1) & 0x0E000E00u); }
DEVICE u32 e2m1_to_f16_high_even(u32 w) { return ((w << 8) & 0x80008000u) | ((w << 5) & 0x0E000E00u); }
DEVICE u32 e2m1_to_f16_high_odd(u32 w) { return (w & 0x80008000u) | ((w >> 3) & 0x0E000E00u); }

// A lane's part of COUNT units of its warp's rows.
template <int COUNT> DEVICE void load_units(uint4 (&units)[COUNT], const u8* codes, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) units[i] = *(const uint4*)(codes + (i * 4 + warp) * 512 + lane * 16);
}

// Groups of 32 columns that a warp has in flight together: whole words of their scales, few registers.
template <int GROUPS> DEVICE constexpr int batch_of() {
  return GROUPS <= 6 ? GROUPS : GROUPS % 4 == 0 ? 4 : GROUPS % 2 == 0 ? 2 : 1;
}

// One batch: its weights, its products, and what scales them.
template <bool FP4, int COLUMNS, int REAL, int COUNT> struct Batch {
  typedef Piece<FP4, COLUMNS> P;
  static constexpr int UNITS = FP4 ? (COUNT + 1) / 2 : COUNT, WORDS = (COUNT + P::WORD - 1) / P::WORD;
  u32 a[COUNT][4];
  float d[COUNT][4];
  u32 scales[WORDS][2];

  // Start the products of groups `first`.. of `piece`; `b` are the operand's codes of that piece, `descriptor` is theirs.
  METHOD void start(const u8* piece, const u8* b, u64 descriptor, int first, int warp, int lane) {
    uint4 units[UNITS];
    load_units(units, piece + first * (FP4 ? 1024 : 2048), warp, lane);
    int row = warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      scales[i][0] = load_scales<P::WORD>(piece + P::CODES, first / P::WORD + i, row);
      scales[i][1] = load_scales<P::WORD>(piece + P::CODES, first / P::WORD + i, row + 8);
    }
    if constexpr (USE_WGMMA) {
#ifdef HAS_WGMMA
#pragma unroll
      for (int g = 0; g < COUNT; g++) {
        if constexpr (FP4) {
          u32 low = g & 1 ? units[g / 2].z : units[g / 2].x, high = g & 1 ? units[g / 2].w : units[g / 2].y;
          a[g][0] = e2m1_low_to_e4m3(low), a[g][1] = e2m1_high_to_e4m3(low);
          a[g][2] = e2m1_low_to_e4m3(high), a[g][3] = e2m1_high_to_e4m3(high);
        } else {
          a[g][0] = units[g].x, a[g][1] = units[g].y, a[g][2] = units[g].z, a[g][3] = units[g].w;
        }
      }
      wgmma_begin();
#pragma unroll
      for (int g = 0; g < COUNT; g++)
        if (first + g < REAL)
          wgmma_e4m3(d[g], a[g][0], a[g][1], a[g][2], a[g][3], wgmma_further(descriptor, (first + g) * 256));
      wgmma_commit();
#endif
    } else {
      const u8* b_row = b + first * 256 + (lane >> 2) * 16 + (lane & 3) * 4;
#pragma unroll
      for (int g = 0; g < COUNT && first + g < REAL; g++) {
        d[g][0] = d[g][1] = d[g][2] = d[g][3] = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 x = *(const u32*)(b_row + (2 * g + half) * 128);
          if constexpr (FP4) {  // the order of columns inside a product is free: even and odd, as the nibbles lie
            u32 w = g & 1 ? (half ? units[g / 2].w : units[g / 2].z) : (half ? units[g / 2].y : units[g / 2].x);
            x = permute_bytes(x, 0, 0x3120);
            mma_f16(d[g], e2m1_to_f16_low_even(w), e2m1_to_f16_high_even(w), e2m1_to_f16_low_odd(w),
                    e2m1_to_f16_high_odd(w), e4m3x2_to_f16x2(x), e4m3x2_to_f16x2(x >> 16));
          } else {
            u32 low = half ? units[g].z : units[g].x, high = half ? units[g].w : units[g].y;
            mma_f16(d[g], e4m3x2_to_f16x2(low), e4m3x2_to_f16x2(high), e4m3x2_to_f16x2(low >> 16),
                    e4m3x2_to_f16x2(high >> 16), e4m3x2_to_f16x2(x), e4m3x2_to_f16x2(x >> 16));
          }
        }
      }
    }
  }

  // acc += the products, scaled; they are complete.
  METHOD void add(float (&acc)[4], const float* b_scales, int first, int lane) {
#pragma unroll
    for (int g = 0; g < COUNT && first + g < REAL; g++) {
      float2 x = *(const float2*)(b_scales + (first + g) * 8 + (lane & 3) * 2);
      float w0 = scale_of(scales[g / P::WORD][0], g % P::WORD), w1 = scale_of(scales[g / P::WORD][1], g % P::WORD);
      acc[0] = fmaf(d[g][0], w0 * x.x, acc[0]);
      acc[1] = fmaf(d[g][1], w0 * x.y, acc[1]);
      acc[2] = fmaf(d[g][2], w1 * x.x, acc[2]);
      acc[3] = fmaf(d[g][3], w1 * x.y, acc[3]);
    }
  }
};

// acc += NUM pieces of a stage, of which only the first REAL groups exist each (fp4 is padded to pairs of groups).
// Accumulators as in mma_f16: lane 4 r + q of warp w has rows 16 w + r (+ 8) and activation rows 2 q, 2 q + 1.
template <bool FP4, int COLUMNS, int REAL, int NUM>
DEVICE void product(float (&acc)[4], const u8* stage, const u8* b, const float* b_scales, int warp, int lane) {
  typedef Piece<FP4, COLUMNS> P;
  constexpr int COUNT = batch_of<COLUMNS / 32>(), PER_PIECE = (REAL + COUNT - 1) / COUNT, BATCHES = NUM * PER_PIECE;
  u64 descriptor = 0;
#ifdef HAS_WGMMA
  // Shuffled, a value is the warp's in the eyes of the compiler: what follows from it stays in uniform registers.
  if constexpr (USE_WGMMA) descriptor = shuffle(wgmma_descriptor(b), 0);
#endif
#pragma unroll
  for (int i = 0; i < BATCHES; i++) {
    int piece = i / PER_PIECE, first = i % PER_PIECE * COUNT, at = piece * REAL * 256;
    Batch<FP4, COLUMNS, REAL, COUNT> batch;
    u64 further = descriptor;
#ifdef HAS_WGMMA
    if constexpr (USE_WGMMA) further = wgmma_further(descriptor, at);
#endif
    batch.start(stage + piece * P::BYTES, b + at, further, first, warp, lane);
#ifdef HAS_WGMMA
    if constexpr (USE_WGMMA) wgmma_wait<0>();
#endif
    batch.add(acc, b_scales + piece * REAL * 8, first, lane);
  }
}

// SwiGLU of a gate and an up sum, with the route's weight; 0 where the row did not choose the expert.
DEVICE float swiglu(float gate_sum, float up_sum, float weight) {
  float gate = fminf(round_bf16(gate_sum), LIMIT);
  float up = fminf(fmaxf(round_bf16(up_sum), -LIMIT), LIMIT);
  return weight == 0.0f ? 0.0f : round_bf16(gate / (1.0f + exp_accurate(-gate)) * up * weight);
}

// ---- the split --------------------------------------------------------------------------------------------------

// `units` products, numbered, over `blocks` blocks in contiguous ranges. A block that already has a share of `beside`
// other units gets so many fewer that the sums are even. Every block below `blocks` has at least one unit.
struct Split {
  int units, blocks, beside;
  static METHOD Split even(int units, int grid) { return Split{units, min(units, grid), 0}; }
  static METHOD Split balanced(int units, int grid, int beside) {
    return units >= 3 * grid ? Split{units, grid, beside} : even(units, grid);
  }
  METHOD int begin(int block) const {
    if (block >= blocks) return units;
    return (units + beside) * block / blocks - beside * block / blocks;
  }
  METHOD int owner(int unit) const {
    int block = min(((unit + 1) * blocks - 1) / units, blocks - 1);
    while (begin(block) > unit) --block;
    while (block + 1 < blocks && begin(block + 1) <= unit) ++block;
    return block;
  }
};

// Blocks that share the units of a tile, and whether this one is the last of them to come: it alone goes on, when all
// others have stored their sums. `ready` asks before storing, as the others mostly were there long ago.
struct Sharing {
  int first, last;  // blocks
  u32* arrivals;    // of this tile; 0 between launches
  METHOD u32 others() const { return (u32)(last - first); }
};
// Place of a block's stored sum: a block has at most one tile that it begins but does not end, and one begun before it.
DEVICE int partial_slot(const Sharing& sharing, int block) { return 2 * block + (block == sharing.first); }

// Called by the 128 threads of a warpgroup; `store` writes this block's sums, `flag` is a word of shared memory.
template <class Store> DEVICE bool last_to_come(const Sharing& sharing, int* flag, int barrier, Store store) {
  bool leader = (threadIdx.x & 127) == 0;
  if (leader) *flag = load_acquire(sharing.arrivals) == sharing.others();
  sync_some(barrier, 128);
  bool last = *flag;
  if (!last) {
    store();
    fence_device();
    sync_some(barrier, 128);
    if (leader) {
      *flag = add_atomic(sharing.arrivals, 1) == sharing.others();
      fence_device();
    }
    sync_some(barrier, 128);
    last = *flag;
  }
  if (last && leader) *sharing.arrivals = 0;  // for the next launch
  return last;
}

// ---- the ring of stages -----------------------------------------------------------------------------------------

struct Cursor {
  int stage = 0;
  u32 parity = 0;
  METHOD void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
