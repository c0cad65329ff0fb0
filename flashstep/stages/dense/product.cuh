// Skinny products of a chain: a block's weights are in its registers before it may look at its activations.
//
// A block takes TILES_* tiles of 16 outputs and 1 / CLUSTER of K. What is left to do behind the wait for the kernel
// before is one trip to L2 for the activations, products out of registers, one sum over the block's parts of K, one over
// the cluster's. Ways to multiply: where the machine has wgmma, wgmma.cuh (fp8 x fp8, up to 8 rows) and wide.cuh (more
// rows, all kinds); and here, by mma.sync: warps divide K among them, each for all tiles, so that every activation is
// read from L2 by one warp of the block. Weights are decoded before the wait; what exceeds the registers lies decoded
// in shared memory.
//
// Rows go through in passes of ROW_TILES tiles of 8; the weights stay. Summation order depends on the shape of the
// launch, not on the rows: a row's bits are its own.
//
// Segments share K and rows and may differ in weight, activations, kind and output. Blocks behind those of the segments
// do other independent work (`extra_block`, of the file that includes this).
//
// Compiled with COLUMNS, SEGMENTS; KIND_s, OUTPUTS_s, FORM_s, STRIDE_s, COLUMN_s of segments 0..4; WARPS,
// BLOCKS_PER_SM, CLUSTER, TILES_FP8, TILES_BF16, ROW_TILES, PASSES, PEERS, SQUARES, PROLOGUE, X_STRIDE, X_SQUARES, EPS,
// WGMMA, LATE_TRIGGER, SHARED.
#pragma once
#include "common.cuh"
#include "dense/norm.cuh"
#include "dense/operands.cuh"
#include "dense/output.cuh"

constexpr int NO_PROLOGUE = 0;  // activations are fragments
constexpr int QUANTIZE = 1;     // x is bf16 [rows][X_STRIDE], its first COLUMNS columns; at most 8 rows
constexpr int NORM_QUANTIZE = 2;

#ifdef HAS_WGMMA
constexpr bool USE_WGMMA = WGMMA;
#else
constexpr bool USE_WGMMA = false;
#endif

constexpr int THREADS = WARPS * 32;
constexpr int WARPGROUPS = WARPS / 4;
constexpr int SLICE = ((GROUPS + CLUSTER - 1) / CLUSTER + WARPGROUPS - 1) / WARPGROUPS * WARPGROUPS;  // of a block
constexpr int PER_WARP = (SLICE + WARPS - 1) / WARPS;  // groups
constexpr int PER_PART = SLICE / WARPGROUPS;           // groups of a warpgroup
constexpr bool EVEN = GROUPS == SLICE * CLUSTER;
constexpr bool WIDE = USE_WGMMA && PASSES * ROW_TILES > 1;  // all kinds by wide.cuh

static_assert(PROLOGUE == NO_PROLOGUE || (CLUSTER == 1 && ROW_TILES == 1 && PASSES == 1 && WARPS == 8), "few rows");
static_assert(WARPS % 4 == 0 && (!USE_WGMMA || WIDE || TILES_FP8 == 4), "a product of wgmma has 64 outputs");

#define OF_SEGMENT(name) (s == 0 ? name##_0 : s == 1 ? name##_1 : s == 2 ? name##_2 : s == 3 ? name##_3 : name##_4)
DEVICE constexpr int kind_of(int s) { return OF_SEGMENT(KIND); }
DEVICE constexpr int outputs_of(int s) { return OF_SEGMENT(OUTPUTS); }
DEVICE constexpr int form_of(int s) { return OF_SEGMENT(FORM); }
DEVICE constexpr int stride_of(int s) { return OF_SEGMENT(STRIDE); }
DEVICE constexpr int column_of(int s) { return OF_SEGMENT(COLUMN); }
#undef OF_SEGMENT
DEVICE constexpr int tiles_per_block(int kind) { return kind == BF16 ? TILES_BF16 : TILES_FP8; }
// Clusters that segment s needs.
DEVICE constexpr int clusters_of(int s) {
  int outputs = 16 * tiles_per_block(kind_of(s));
  return (outputs_of(s) + outputs - 1) / outputs;
}
DEVICE constexpr bool has_kind(int kind) {
  for (int s = 0; s < SEGMENTS; ++s)
    if (kind_of(s) == kind) return true;
  return false;
}
DEVICE constexpr bool whole_groups() {  // of 32 outputs to every 8 lanes, where the output takes them
  for (int s = 0; s < SEGMENTS; ++s)
    if (takes_groups(form_of(s)) && tiles_per_block(kind_of(s)) % 2 != 0) return false;
  return true;
}
DEVICE constexpr bool wide_tiles() {
  for (int s = 0; s < SEGMENTS; ++s)
    if (tiles_per_block(kind_of(s)) % 4 != 0 || WARPS % tiles_per_block(kind_of(s)) != 0) return false;
  return true;
}
static_assert(!WIDE || wide_tiles(), "64 outputs for a warpgroup, or for all");
static_assert(whole_groups(), "an output by groups of 32 needs an even number of tiles a block");
// Whether the last block of every segment of the kind has all its tiles.
DEVICE constexpr bool whole_blocks(int kind) {
  for (int s = 0; s < SEGMENTS; ++s)
    if (kind_of(s) == kind && outputs_of(s) % (16 * tiles_per_block(kind)) != 0) return false;
  return true;
}
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// ---- shared memory ------------------------------------------------------------------------------------------------

DEVICE constexpr bool by_wgmma(int kind) { return USE_WGMMA && !WIDE && kind == FP8; }
// Parts of K in a block, each with sums of its own.
DEVICE constexpr int parts_of(int kind) {
  return WIDE ? WARPS / tiles_per_block(kind) : by_wgmma(kind) ? WARPGROUPS : WARPS;
}
DEVICE constexpr int sums_stride(int tiles) { return 16 * tiles + 4; }
DEVICE constexpr int sums_bytes(int kind) {
  return parts_of(kind) * ROW_TILES * 8 * sums_stride(tiles_per_block(kind)) * 4;
}
// Four outputs of a row are an item; a cluster shares the items of its tiles out among its blocks, whole groups of 32
// outputs to each, and a block has mail for the sums of its share: from every part of every block (wgmma.cuh), or from
// every block, two passes in turn.
DEVICE constexpr int items(int tiles) { return ROW_TILES * 8 * tiles * 4; }
DEVICE constexpr int items_per_block(int tiles) { return (items(tiles) / 8 + CLUSTER - 1) / CLUSTER * 8; }
DEVICE constexpr int senders_of(int kind) { return by_wgmma(kind) ? CLUSTER * WARPGROUPS : CLUSTER; }
DEVICE constexpr int mail_bytes(int kind) {
  return CLUSTER == 1 ? 0 : (PASSES > 1 ? 2 : 1) * senders_of(kind) * items_per_block(tiles_per_block(kind)) * 16;
}
// Units that a warp of mma.sync keeps in registers, 8 registers each; the others lie in shared memory.
constexpr int MOST_HELD = BLOCKS_PER_SM > 1 ? 12 : 16;
DEVICE constexpr int units_of(int kind) { return tiles_per_block(kind) * PER_WARP; }
DEVICE constexpr int held_of(int kind) { return units_of(kind) < MOST_HELD ? units_of(kind) : MOST_HELD; }
constexpr int X_BUFFERS = PASSES > 1 ? 2 : 1;  // a pass is multiplied, the next one copied
constexpr int X_BYTES = SLICE * 256;           // of 8 rows
DEVICE constexpr int x_bytes(int kind) {       // activations in shared memory; scales as float32, or as codes
  if (WIDE) {
    int scales = kind == FP8 ? SLICE * 32 : 0;
    return X_BUFFERS * ROW_TILES * (SLICE * fragment_bytes(kind) + scales) + WARPS * SLICE * 4;
  }
  if (by_wgmma(kind)) return X_BYTES + SLICE * 32 + WARPS * PER_PART * 4;
  return PROLOGUE ? X_BYTES + SLICE * 8 : 0;
}
DEVICE constexpr int over_bytes(int kind) {
  return WIDE || by_wgmma(kind) ? 0 : WARPS * (units_of(kind) - held_of(kind)) * 1024;
}
template <class F> DEVICE constexpr int most(F f) {
  int result = 0;
  for (int s = 0; s < SEGMENTS; ++s) result = larger(result, f(kind_of(s)));
  return result;
}

constexpr int SUMS_AT = 0;
constexpr int MAIL_AT = SUMS_AT + most(sums_bytes);
constexpr int NORM_AT = MAIL_AT + most(mail_bytes);  // norm weights
constexpr int TOTALS_AT = NORM_AT + (PROLOGUE == NORM_QUANTIZE ? COLUMNS * 4 : 0);  // of squares [8 warps][8 rows]
constexpr int INBOX_AT = TOTALS_AT + (PROLOGUE == NORM_QUANTIZE ? 256 : 0);
constexpr int X_AT = INBOX_AT + 32;
constexpr int OVER_AT = X_AT + (most(x_bytes) + 15) / 16 * 16;
// (Constants meant for a machine with wgmma are compiled for all.)
static_assert(SHARED >= OVER_AT + most(over_bytes) || WGMMA != USE_WGMMA, "cuda.py counts shared memory as this file does");

// ---- parts of a block's work ----------------------------------------------------------------------------------------

DEVICE void await_dependencies() {
  wait_for_dependencies();
  if (LATE_TRIGGER) launch_dependents();
}

struct Block {
  Place place;
  int first_tile;   // of its cluster
  int rank;         // in its cluster
  int first_group;  // of its slice of K, and how many there are
  int groups;
  u8* shared;
};

template <int KIND, class P> DEVICE Block block_of(const P& p, int s, int first_tile, u8* shared) {
  int rank = CLUSTER > 1 ? cluster_rank() : 0, first = rank * SLICE;
  return {{form_of(s), p.out[s], p.out_scales[s], outputs_of(s), stride_of(s), column_of(s)},
          first_tile, rank, first, max(0, min(SLICE, GROUPS - first)), shared};
}

// Keeps `value` computed where it is: behind the wait every instruction counts.
template <class T> DEVICE void pin(T& value) {
#ifndef FLASHSTEP_EMULATE
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(value));
  else asm volatile("" : "+r"(value));
#endif
}

// Mail announces itself. (A barrier of the cluster would wait for all that has been stored to global memory.)
DEVICE u64* inbox_of(const Block& b, int pass) { return (u64*)(b.shared + INBOX_AT) + (pass & 1); }
// The items of a pass that a block combines.
template <int KIND, class P> DEVICE int items_of(const Block& b, const P& p, int pass) {
  constexpr int TILES = tiles_per_block(KIND), SHARE = items_per_block(TILES);
  int rows = min(p.rows - pass * ROW_TILES * 8, ROW_TILES * 8);
  return min(rows * TILES * 4 - b.rank * SHARE, SHARE);
}
template <int KIND, class P> DEVICE void expect_mail(const Block& b, const P& p, int pass) {  // by one thread
  int mine = items_of<KIND>(b, p, pass);
  if (mine > 0) barrier_expect(inbox_of(b, pass), mine * senders_of(KIND) * 16);
}

// First of all, by all threads: the block's mailbox opens, and the cluster's blocks say so to each other.
template <int KIND, class P> DEVICE void prepare(const Block& b, const P& p) {
  if (CLUSTER > 1 && threadIdx.x == 0) {
    barrier_init(inbox_of(b, 0), 1);
    if (PASSES > 1) barrier_init(inbox_of(b, 1), 1);
    barrier_init_fence();
    expect_mail<KIND>(b, p, 0);
    if (PASSES > 1) expect_mail<KIND>(b, p, 1);
  }
  if (CLUSTER > 1) cluster_arrive();  // before any load is under way, which it would wait for
}

// A thread's part of the norm weights, on its way to shared memory past the weights that are asked for in between.
constexpr int NORM_CHUNKS = PROLOGUE == NORM_QUANTIZE ? COLUMNS / 4 : 0;
constexpr int NORM_PER_THREAD = NORM_CHUNKS ? (NORM_CHUNKS + THREADS - 1) / THREADS : 1;
struct NormPart { uint4 value[NORM_PER_THREAD]; };
template <class P> DEVICE void load_norm(NormPart& part, const P& p) {
#pragma unroll
  for (int i = 0; i < NORM_PER_THREAD; ++i)
    if (NORM_CHUNKS && i * THREADS + (int)threadIdx.x < NORM_CHUNKS)
      part.value[i] = load_stream((const uint4*)p.norm + i * THREADS + threadIdx.x);
}

// The end of what is done before the wait, and the wait.
DEVICE void await_turn(u8* shared, const NormPart& norm) {
#pragma unroll
  for (int i = 0; i < NORM_PER_THREAD; ++i)
    if (NORM_CHUNKS && i * THREADS + (int)threadIdx.x < NORM_CHUNKS)
      ((uint4*)(shared + NORM_AT))[i * THREADS + threadIdx.x] = norm.value[i];
  if (NORM_CHUNKS) sync_block();
  if (CLUSTER > 1) cluster_wait();
  await_dependencies();
}

// PROLOGUE: the rows as fp8, whose groups w, w + 8, .. warp w hands to `store(group, row, quarter, codes, scale)`.
template <class P, class Store> DEVICE void quantize_input(const P& p, const void* x, u8* shared, Store store) {
  int warp = warp_id(), count = GROUPS % 8 == 0 ? GROUPS / 8 : (GROUPS + 7 - warp) / 8;  // no branches where all are
  quantize_rows<PROLOGUE == NORM_QUANTIZE, (GROUPS + 7) / 8, 8, GROUPS, X_SQUARES>(
      (const bf16*)x + warp * 32, X_STRIDE, count, p.rows, p.x_squares, EPS,
      (const float*)(shared + NORM_AT) + warp * 32, (float*)(shared + TOTALS_AT),
      [&](int i, int row, int quarter, uint2 words, u32 code) { store(i * 8 + warp, row, quarter, words, code); });
}

// A block's share of a cluster's outputs, from the mail of all senders.
template <int KIND, class P> DEVICE void combine(const Block& b, const P& p, const float4* mail, int first_row, int rows) {
  constexpr int TILES = tiles_per_block(KIND), ITEMS = items(TILES), SHARE = items_per_block(TILES);
#pragma unroll
  for (int base = 0; base < SHARE; base += THREADS) {
    int mine = base + (int)threadIdx.x, item = b.rank * SHARE + mine;
    if (base + warp_id() * 32 >= SHARE) break;
    bool wanted = mine < SHARE && item < ITEMS;
    if (!wanted) mine = item = 0;
    int row = item / (4 * TILES), quad = item % (4 * TILES);
    float4 v = mail[mine];
#pragma unroll
    for (int r = 1; r < senders_of(KIND); ++r) {
      float4 other = mail[r * SHARE + mine];
      v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
    }
    emit(p, b.place, wanted && row < rows, first_row + row, b.first_tile * 16 + quad * 4, v);
  }
}

// All threads of a block wait for its mail, if any comes: that of a pass says that the pass before is combined
// everywhere, so that what follows may take the place of what came then. In the last pass, warps with nothing to
// combine are done.
template <int KIND, class P> DEVICE void await_mail(const Block& b, const P& p, int pass) {
  constexpr int TILES = tiles_per_block(KIND), SHARE = items_per_block(TILES);
  if (pass == PASSES - 1 && warp_id() * 32 >= SHARE) return;
  if (items_of<KIND>(b, p, pass) <= 0) return;
  barrier_wait(inbox_of(b, pass), pass >> 1 & 1);
  if (pass + 2 < PASSES && threadIdx.x == 0) expect_mail<KIND>(b, p, pass + 2);
  const float4* mail = (const float4*)(b.shared + MAIL_AT) + (pass & 1) * senders_of(KIND) * SHARE;
  combine<KIND>(b, p, mail, pass * ROW_TILES * 8, p.rows - pass * ROW_TILES * 8);
}

// By all threads, behind the barrier that follows the last store into `sums` [part][row][stride]: the outputs of a pass.
template <int KIND, class P> DEVICE void finish_pass(const Block& b, const P& p, int pass) {
  constexpr int TILES = tiles_per_block(KIND), STRIDE = sums_stride(TILES);
  constexpr int ITEMS = items(TILES), SHARE = items_per_block(TILES);
  const float* sums = (const float*)(b.shared + SUMS_AT);
  float4* mail = (float4*)(b.shared + MAIL_AT) + (pass & 1) * CLUSTER * SHARE;
  int first_row = pass * ROW_TILES * 8, rows = p.rows - first_row;
#pragma unroll
  for (int base = 0; base < ITEMS; base += THREADS) {
    int item = base + (int)threadIdx.x, row = item / (4 * TILES), quad = item % (4 * TILES);
    if (base + warp_id() * 32 >= ITEMS) break;
    const float4* part = (const float4*)(sums + row * STRIDE + quad * 4);
    float4 v = part[0];
#pragma unroll
    for (int w = 1; w < parts_of(KIND); ++w) {
      float4 other = part[w * ROW_TILES * 8 * STRIDE / 4];
      v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
    }
    if constexpr (CLUSTER == 1) {
      emit(p, b.place, row < rows, first_row + row, b.first_tile * 16 + quad * 4, v);
    } else {
      if (row < rows) cluster_store(mail + b.rank * SHARE + item % SHARE, item / SHARE, v, inbox_of(b, pass));
    }
  }
  if (CLUSTER > 1) await_mail<KIND>(b, p, pass);
  if (PASSES > 2 && (CLUSTER - 1) * SHARE >= ITEMS) cluster_sync();  // a block without mail would run ahead
}

// ---- by mma.sync ----------------------------------------------------------------------------------------------------

template <int KIND, class P> DEVICE void product_block(const P& p, int s, int first_tile, u8* shared) {
  constexpr int TILES = tiles_per_block(KIND), UNITS = units_of(KIND), HELD = held_of(KIND), BATCH = 4;
  constexpr int STRIDE = sums_stride(TILES);
  constexpr int SETS = KIND == BF16 && TILES < 4 ? 4 / TILES : 1;  // chains of mma in flight
  constexpr bool FROM_L2 = PROLOGUE == NO_PROLOGUE;
  Block b = block_of<KIND>(p, s, first_tile, shared);
  NormPart norm_part;
  prepare<KIND>(b, p);
  load_norm(norm_part, p);
  int warp = warp_id(), lane = lane_id(), warp_group = warp * PER_WARP;  // in the slice
  int tiles = (outputs_of(s) + 15) / 16 - first_tile;

  // Unit u: tile u % TILES, group u / TILES of the warp's.
  constexpr int TILE_BYTES = packed_groups(KIND) * group_bytes(KIND);
  constexpr bool ALL = EVEN && SLICE == PER_WARP * WARPS;
  const u8* weight = p.weight[s] + (i64)first_tile * TILE_BYTES;
  int first = b.first_group + warp_group;
  auto exists = [&](int u) {
    return (whole_blocks(KIND) || u % TILES < tiles) && (ALL || warp_group + u / TILES < b.groups);
  };
  const u8* units_at = weight + first * unit_bytes(KIND) + lane * 16;
  auto fetch = [&](Unit& unit, int u) {
    unit.first = unit.second = make_uint4(0, 0, 0, 0);
    if (exists(u)) stream_unit<KIND>(unit, units_at + (u % TILES * TILE_BYTES + u / TILES * unit_bytes(KIND)));
  };
  float scales[(UNITS + 31) / 32];  // lane u % 32 has that of unit u
#pragma unroll
  for (int i = 0; i < (UNITS + 31) / 32; ++i) {
    int u = i * 32 + lane;
    scales[i] = 0.0f;
    if (KIND != BF16 && u < UNITS && exists(u))
      scales[i] = *(const float*)(weight + u % TILES * TILE_BYTES + packed_groups(KIND) * unit_bytes(KIND) +
                                  (first + u / TILES) * 4);
  }
  auto scale_of = [&](int u) { return KIND == BF16 ? 1.0f : shuffle(scales[u / 32], u % 32); };

  Unit units[HELD];
#pragma unroll
  for (int u = 0; u < HELD; ++u) fetch(units[u], u);
  uint4* over = (uint4*)(shared + OVER_AT) + warp * (UNITS - HELD) * 64 + lane;
#pragma unroll
  for (int base = HELD; base < UNITS; base += BATCH) {
    Unit batch[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (base + i < UNITS) fetch(batch[i], base + i);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (base + i >= UNITS) continue;
      Operand w;
      decode_unit<KIND>(w, batch[i], scale_of(base + i));
      over[(base + i - HELD) * 64] = make_uint4(w.a[0], w.a[1], w.a[2], w.a[3]);
      over[(base + i - HELD) * 64 + 32] = make_uint4(w.a[4], w.a[5], w.a[6], w.a[7]);
    }
  }
  Operand held[HELD];
#pragma unroll
  for (int u = 0; u < HELD; ++u) decode_unit<KIND>(held[u], units[u], scale_of(u));
  const u8* x = FROM_L2 ? (const u8*)p.x[s] : shared + X_AT;
  const u8* x_scales = FROM_L2 ? p.x_scales[s] : shared + X_AT + X_BYTES;
  x += first * fragment_bytes(KIND) + lane_offset<KIND>();
  x_scales += first * 8 + scales_offset();
  pin(x), pin(x_scales);
  await_turn(shared, norm_part);
  if constexpr (!FROM_L2) {
    quantize_input(p, p.x[s], shared, [&](int group, int row, int quarter, uint2 words, u32 code) {
      *(uint2*)(shared + X_AT + codes_offset(group, row, quarter)) = words;
      if (quarter == 0) (shared + X_AT + X_BYTES)[group * 8 + row] = (u8)code;
    });
    sync_block();
  }

  auto load = [&](Activations(&to)[PER_WARP], int row_tile) {
    const u8* fragments = x + (i64)row_tile * GROUPS * fragment_bytes(KIND);
    const u8* codes = x_scales + (i64)row_tile * GROUPS * 8;
    bool has_tile = row_tile * 8 < p.rows, has_row = row_tile * 8 + (lane >> 2) < p.rows;
#pragma unroll
    for (int g = 0; g < PER_WARP; ++g) {
      bool here = ALL || warp_group + g < b.groups;
      to[g].word[0] = to[g].word[1] = to[g].word[2] = to[g].word[3] = to[g].scales = 0;
      if (here && has_row)  // rows that are not there cost no traffic
        load_activations<KIND, FROM_L2>(to[g], fragments + g * fragment_bytes(KIND));
      if (here && has_tile) load_scales<KIND, FROM_L2>(to[g], codes + g * 8);
    }
  };
  Activations now[PER_WARP], next[PER_WARP];
  load(now, 0);
  float* sums = (float*)(shared + SUMS_AT) + warp * ROW_TILES * 8 * STRIDE;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll 1
    for (int j = 0; j < ROW_TILES; ++j) {
      int row_tile = pass * ROW_TILES + j;
      if (PASSES * ROW_TILES > 1 && row_tile * 8 >= p.rows) break;
      if (PASSES * ROW_TILES > 1) load(next, row_tile + 1);
      float acc[SETS][TILES][4];
#pragma unroll
      for (int i = 0; i < SETS * TILES * 4; ++i) acc[i / (TILES * 4)][i / 4 % TILES][i % 4] = 0.0f;
#pragma unroll
      for (int g = 0; g < PER_WARP; ++g) {
        Columns columns;
        decode_activations<KIND>(columns, now[g]);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          int u = g * TILES + t;
          float scale = KIND == FP8 ? scale_of(u) : 1.0f;
          if (u < HELD) {
            multiply<KIND>(acc[g % SETS][t], held[u < HELD ? u : 0], scale, columns);
          } else {
            uint4 first = over[(u - HELD) * 64], second = over[(u - HELD) * 64 + 32];
            Operand w = {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
            multiply<KIND>(acc[g % SETS][t], w, scale, columns);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int set = 1; set < SETS; ++set)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[0][t][i] += acc[set][t][i];
        store_accumulators(sums + j * 8 * STRIDE + t * 16, STRIDE, acc[0][t]);
      }
#pragma unroll
      for (int g = 0; g < PER_WARP; ++g) now[g] = next[g];
    }
    sync_block();
    finish_pass<KIND>(b, p, pass);
    if (PASSES > 1) sync_block();  // the sums are read
  }
}

#ifdef HAS_WGMMA
#include "dense/wgmma.cuh"
#include "dense/wide.cuh"
#endif

template <int KIND, class P> DEVICE void segment_block(const P& p, int s, int first_tile, u8* shared) {
  if constexpr (!WIDE && !by_wgmma(KIND)) product_block<KIND>(p, s, first_tile, shared);
#ifdef HAS_WGMMA
  else if constexpr (WIDE) wide_block<KIND>(p, s, first_tile, shared);
  else wgmma_block(p, s, first_tile, shared);
#endif
}

// The whole kernel. `extra_block(p, i, shared)` does the work of the i-th block behind those of the segments.
template <class P> DEVICE void run_product(const P& p) {
  if (!LATE_TRIGGER) launch_dependents();
  u8* shared = shared_memory();
  int cluster = (int)blockIdx.x / CLUSTER, s = 0;
#pragma unroll
  for (int i = 0; i < SEGMENTS; ++i)
    if (s == i && cluster >= clusters_of(i)) {
      cluster -= clusters_of(i);
      s = i + 1;
    }
  if (s == SEGMENTS) {
    extra_block(p, cluster * CLUSTER + (int)blockIdx.x % CLUSTER, shared);
    return;
  }
  int kind = kind_of(s), first_tile = cluster * tiles_per_block(kind);
  if constexpr (has_kind(FP8))
    if (kind == FP8) segment_block<FP8>(p, s, first_tile, shared);
  if constexpr (has_kind(FP8_AT_BF16))
    if (kind == FP8_AT_BF16) segment_block<FP8_AT_BF16>(p, s, first_tile, shared);
  if constexpr (has_kind(BF16))
    if (kind == BF16) segment_block<BF16>(p, s, first_tile, shared);
}
