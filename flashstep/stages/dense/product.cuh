// Skinny products of a chain: a block's weights are in shared memory before it may look at its activations.
//
// A block takes TILES_* tiles of 16 outputs and 1 / CLUSTER of K; its warps divide that K among them, each for all
// tiles, so that every activation is read from L2 by one warp of the block. The partial sums of the warps meet in
// shared memory, those of a cluster's blocks in the block that finishes the outputs. Rows go through in passes of
// ROW_TILES tiles of 8; the weights stay. Summation order depends on the shape of the launch, not on the rows: a row's
// bits are its own.
//
// Segments share K and rows and may differ in weight, activations, kind and output. Blocks behind those of the segments
// do other independent work (`extra_block`, of the file that includes this).
//
// Compiled with COLUMNS, SEGMENTS; KIND_s, OUTPUTS_s, FORM_s, STRIDE_s, COLUMN_s of segments 0..4; WARPS,
// BLOCKS_PER_SM, CLUSTER, TILES_FP8, TILES_BF16, ROW_TILES, PEERS, PROLOGUE, X_STRIDE, EPS, REHEARSE, SHARED.
#pragma once
#include "common.cuh"
#include "dense/norm.cuh"
#include "dense/operands.cuh"
#include "dense/output.cuh"

constexpr int NO_PROLOGUE = 0;  // activations are fragments
constexpr int QUANTIZE = 1;     // x is bf16 [rows][X_STRIDE], its first COLUMNS columns; at most 8 rows
constexpr int NORM_QUANTIZE = 2;

constexpr int THREADS = WARPS * 32;
constexpr int SLICE = ((GROUPS + CLUSTER - 1) / CLUSTER + 3) / 4 * 4;  // groups of a block
constexpr int PER_WARP = (SLICE + WARPS - 1) / WARPS;
constexpr bool EVEN = GROUPS == SLICE * CLUSTER && SLICE == PER_WARP * WARPS;
constexpr int COPY_BYTES = 16384;

static_assert(PROLOGUE == NO_PROLOGUE || (CLUSTER == 1 && ROW_TILES == 1 && WARPS % 8 == 0), "a warp or more a row");

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
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// ---- shared memory ------------------------------------------------------------------------------------------------

DEVICE constexpr int weight_bytes() {
  int most = 0;
  for (int s = 0; s < SEGMENTS; ++s)
    most = larger(most, tiles_per_block(kind_of(s)) * SLICE * group_bytes(kind_of(s)));
  return most;
}
DEVICE constexpr int most_tiles() {
  int most = 0;
  for (int s = 0; s < SEGMENTS; ++s) most = larger(most, tiles_per_block(kind_of(s)));
  return most;
}
DEVICE constexpr int sums_stride(int tiles) { return 16 * tiles + 4; }
DEVICE constexpr int sums_bytes(int tiles) { return WARPS * ROW_TILES * 8 * sums_stride(tiles) * 4; }
// Four outputs of a row are an item; a cluster shares the items of its tiles out among its blocks, whole groups of 32
// outputs to each.
DEVICE constexpr int items(int tiles) { return ROW_TILES * 8 * tiles * 4; }
DEVICE constexpr int items_per_block(int tiles) { return (items(tiles) / 8 + CLUSTER - 1) / CLUSTER * 8; }
// Bytes between pieces of fragments; 128 in shared memory would put all stores of the prologue on a few banks.
constexpr int X_PIECE = PROLOGUE ? 144 : 128;

constexpr int SUMS_AT = (weight_bytes() + 15) / 16 * 16;
constexpr int MAIL_AT = SUMS_AT + sums_bytes(most_tiles());  // from the cluster's blocks, two passes in turn
constexpr int X_AT = MAIL_AT + (CLUSTER > 1 ? 2 * CLUSTER * items_per_block(most_tiles()) * 16 : 0);
constexpr int X_SCALES_AT = X_AT + (PROLOGUE ? 2 * GROUPS * X_PIECE : 0);
constexpr int NORM_AT = X_SCALES_AT + (PROLOGUE ? (GROUPS * 8 + 15) / 16 * 16 : 0);
constexpr int BARRIERS_AT = NORM_AT + (PROLOGUE == NORM_QUANTIZE ? COLUMNS * 4 : 0);  // weights; norm weights
static_assert(SHARED >= BARRIERS_AT + 16, "cuda.py counts shared memory as this file does");

// ---- parts of a block's work ----------------------------------------------------------------------------------------

DEVICE void copy_in_pieces(u8* to, const u8* from, int bytes, u64* barrier, u64 policy) {
  for (int at = 0; at < bytes; at += COPY_BYTES)
    bulk_copy(to + at, from + at, min(COPY_BYTES, bytes - at), barrier, policy);
}

// One thread: the weights of `tiles` tiles from `weight`, groups first .. first + SLICE - 1.
template <int KIND> DEVICE void start_copies(u8* shared, const u8* weight, int tiles, int first, u64* barrier) {
  int groups = min(SLICE, packed_groups(KIND) - first);
  barrier_expect(barrier, groups > 0 ? tiles * groups * group_bytes(KIND) : 0);
  if (groups <= 0) return;
  u64 policy = evict_first_policy();
  for (int t = 0; t < tiles; ++t) {
    const u8* tile = weight + (i64)t * packed_groups(KIND) * group_bytes(KIND);
    u8* to = shared + t * SLICE * group_bytes(KIND);
    copy_in_pieces(to, tile + first * unit_bytes(KIND), groups * unit_bytes(KIND), barrier, policy);
    const u8* scales = tile + packed_groups(KIND) * unit_bytes(KIND) + first * 4;
    if (KIND != BF16) bulk_copy(to + SLICE * unit_bytes(KIND), scales, groups * 4, barrier, policy);
  }
}

// The outputs of tiles first_tile .. first_tile + TILES - 1 of segment s, this block's share of them in a cluster.
template <int KIND, int TILES, class P>
DEVICE void product_block(const P& p, int s, int first_tile, u8* shared) {
  constexpr int STRIDE = sums_stride(TILES), ITEMS = items(TILES), SHARE = items_per_block(TILES);
  constexpr int SETS = KIND == BF16 && TILES * ROW_TILES < 4 ? 4 / (TILES * ROW_TILES) : 1;  // chains of mma in flight
  // Groups whose activations are asked for at once: all where one tile of rows leaves the registers for it.
  constexpr int AHEAD = ROW_TILES == 1 ? PER_WARP : ROW_TILES == 2 ? 4 : ROW_TILES == 3 && BLOCKS_PER_SM == 1 ? 2 : 1;
  constexpr int CHUNKS = (PER_WARP + AHEAD - 1) / AHEAD;
  constexpr int TILE = SLICE * group_bytes(KIND);
  u64* ready = (u64*)(shared + BARRIERS_AT);
  int rank = CLUSTER > 1 ? cluster_rank() : 0, first_group = rank * SLICE;
  int groups = min(SLICE, GROUPS - first_group);  // may be below 0
  int tiles = min(TILES, (outputs_of(s) + 15) / 16 - first_tile);

  if (threadIdx.x == 0) {
    barrier_init(ready, 1);
    barrier_init(ready + 1, 1);
    barrier_init_fence();
    const u8* weight = p.weight[s] + (i64)first_tile * packed_groups(KIND) * group_bytes(KIND);
    start_copies<KIND>(shared, weight, tiles, first_group, ready);
    if (PROLOGUE == NORM_QUANTIZE) {
      barrier_expect(ready + 1, COLUMNS * 4);
      bulk_copy(shared + NORM_AT, p.norm, COLUMNS * 4, ready + 1);
    }
  }
  sync_block();
  if (CLUSTER > 1) cluster_arrive();  // waited for before the first store into another block

  int warp = warp_id(), lane = lane_id(), warp_group = warp * PER_WARP;  // in the slice
  constexpr int X_GROUP = PROLOGUE ? 2 * X_PIECE : fragment_bytes(KIND);  // bytes between groups
  // The lane's part of the warp's first group, of the rows of a pass.
  const u8* x = PROLOGUE ? shared + X_AT : (const u8*)p.x[s];
  const u8* x_scales = PROLOGUE ? shared + X_SCALES_AT : p.x_scales[s];
  x += (first_group + warp_group) * X_GROUP + lane_offset<KIND>();
  x_scales += (first_group + warp_group) * 8 + scales_offset();
  const u8* weights = shared + warp_group * unit_bytes(KIND);
  const float* scales = (const float*)(shared + SLICE * unit_bytes(KIND)) + warp_group;
  Place place = {form_of(s), p.out[s], p.out_scales[s], outputs_of(s), stride_of(s), column_of(s)};

  // A rehearsal is a pass without rows before the wait: it brings the instructions behind the wait into the caches.
  int first_pass = REHEARSE ? -1 : 0;
  for (int pass = first_pass; pass < 1 || pass * ROW_TILES * 8 < p.rows; ++pass) {
    int first_row = pass * ROW_TILES * 8, rows = pass < 0 ? 0 : p.rows - first_row;
    if (pass == 0) {
      wait_for_dependencies();
      if constexpr (PROLOGUE != NO_PROLOGUE) {
        constexpr int PER_LANE = (COLUMNS + 255) / 256;
        int row = warp % 8;
        if (PROLOGUE == NORM_QUANTIZE) barrier_wait(ready + 1, 0);
        if (row < rows)
          quantize_row<PROLOGUE == NORM_QUANTIZE, PER_LANE, X_PIECE, WARPS / 8>(
              (const bf16*)p.x[s] + (i64)row * X_STRIDE, COLUMNS / 8, (const float*)(shared + NORM_AT), EPS, warp / 8,
              shared + X_AT + row * 16, shared + X_SCALES_AT + row);
        sync_block();
      }
    }

    float acc[SETS][TILES][ROW_TILES][4];
#pragma unroll
    for (int i = 0; i < SETS * TILES * ROW_TILES * 4; ++i)
      acc[i / (TILES * ROW_TILES * 4)][i / (ROW_TILES * 4) % TILES][i / 4 % ROW_TILES][i % 4] = 0.0f;

    bool has_tile[ROW_TILES], has_row[ROW_TILES];
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) {
      has_tile[j] = rows > j * 8;
      has_row[j] = rows > j * 8 + (PROLOGUE ? 0 : lane >> 2);  // rows that are not there cost no traffic
    }
    auto load = [&](Activations(&to)[AHEAD][ROW_TILES], int chunk) {
      const u8* fragments = x + chunk * AHEAD * X_GROUP;  // everything behind it is an offset in the instruction
      const u8* codes = x_scales + chunk * AHEAD * 8;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j) {
          int g = chunk * AHEAD + i;
          bool here = (EVEN || warp_group + g < groups) && (PER_WARP % AHEAD == 0 || g < PER_WARP);
          Activations& a = to[i][j];
          a.word[0] = a.word[1] = a.word[2] = a.word[3] = a.scales = 0;
          if (here && has_tile[j]) load_scales<KIND, PROLOGUE == NO_PROLOGUE>(a, codes + (j * GROUPS + i) * 8);
          if (here && has_row[j])
            load_activations<KIND, X_PIECE, PROLOGUE == NO_PROLOGUE>(a, fragments + (j * GROUPS + i) * X_GROUP);
        }
    };
    auto compute = [&](const Activations(&from)[AHEAD][ROW_TILES], int chunk) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        int g = chunk * AHEAD + i;
        if ((!EVEN && warp_group + g >= groups) || (PER_WARP % AHEAD != 0 && g >= PER_WARP)) continue;
        Columns columns[ROW_TILES];
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j) decode_activations<KIND>(columns[j], from[i][j]);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          Rows w;
          decode_weights<KIND>(w, weights + t * TILE + g * unit_bytes(KIND));
          float scale = KIND == BF16 ? 1.0f : scales[t * (TILE / 4) + g];
#pragma unroll
          for (int j = 0; j < ROW_TILES; ++j) multiply<KIND>(acc[i % SETS][t][j], w, scale, columns[j]);
        }
      }
    };

    Activations even[AHEAD][ROW_TILES], odd[AHEAD][ROW_TILES];
    load(even, 0);
    barrier_wait(ready, 0);
    if constexpr (CHUNKS == 1) {
      compute(even, 0);
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
        if (chunk + 1 < CHUNKS) load(odd, chunk + 1);
        compute(even, chunk);
        if (chunk + 2 < CHUNKS) load(even, chunk + 2);
        if (chunk + 1 < CHUNKS) compute(odd, chunk + 1);
      }
    }

    float* sums = (float*)(shared + SUMS_AT);  // [warp][row][STRIDE]
    if (pass > first_pass) sync_block();       // those of the last pass are read
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int j = 0; j < ROW_TILES; ++j) {
#pragma unroll
        for (int set = 1; set < SETS; ++set)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[0][t][j][i] += acc[set][t][j][i];
        store_accumulators(sums + (warp * ROW_TILES + j) * 8 * STRIDE + t * 16, STRIDE, acc[0][t][j]);
      }
    sync_block();
    if (CLUSTER > 1 && pass == first_pass) cluster_wait();
    float4* mail = (float4*)(shared + MAIL_AT) + (pass & 1) * CLUSTER * SHARE;
#pragma unroll
    for (int base = 0; base < ITEMS; base += THREADS) {
      int item = base + (int)threadIdx.x, row = item / (4 * TILES), quad = item % (4 * TILES);
      if (base + warp * 32 >= ITEMS) break;
      const float4* part = (const float4*)(sums + row * STRIDE + quad * 4);
      float4 v = part[0];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        float4 other = part[w * ROW_TILES * 8 * STRIDE / 4];
        v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
      }
      if (CLUSTER == 1) emit(p, place, row < rows, first_row + row, first_tile * 16 + quad * 4, v);
      else *cluster_map(mail + rank * SHARE + item % SHARE, item / SHARE) = v;
    }
    if constexpr (CLUSTER > 1) {
      cluster_sync();
#pragma unroll
      for (int base = 0; base < SHARE; base += THREADS) {
        int mine = base + (int)threadIdx.x, item = rank * SHARE + mine;
        if (base + warp * 32 >= SHARE) break;
        bool wanted = mine < SHARE && item < ITEMS;
        if (!wanted) mine = item = 0;
        int row = item / (4 * TILES), quad = item % (4 * TILES);
        float4 v = mail[mine];
#pragma unroll
        for (int r = 1; r < CLUSTER; ++r) {
          float4 other = mail[r * SHARE + mine];
          v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
        }
        emit(p, place, wanted && row < rows, first_row + row, first_tile * 16 + quad * 4, v);
      }
    }
    if (pass >= 0) {
      x += ROW_TILES * GROUPS * X_GROUP;
      x_scales += ROW_TILES * GROUPS * 8;
    }
  }
}

// The whole kernel. `extra_block(p, i, shared)` does the work of the i-th block behind those of the segments.
template <class P> DEVICE void run_product(const P& p) {
  launch_dependents();
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
    if (kind == FP8) product_block<FP8, TILES_FP8>(p, s, first_tile, shared);
  if constexpr (has_kind(FP8_AT_BF16))
    if (kind == FP8_AT_BF16) product_block<FP8_AT_BF16, TILES_FP8>(p, s, first_tile, shared);
  if constexpr (has_kind(BF16))
    if (kind == BF16) product_block<BF16, TILES_BF16>(p, s, first_tile, shared);
}
