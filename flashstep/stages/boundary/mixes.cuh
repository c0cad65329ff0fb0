// The dot products behind a sublayer's mixing coefficients, as a part that other kernels run on spare blocks.
//
// For every row of the stream: 24 products of its hc * hidden columns with fn, and the sum of their squares, in
// float32. The columns are cut into slices, one block each; the boundary that follows adds the slices in order and
// makes the coefficients of the sums (boundary.cu). A block calls, with all its threads (128..512, whole warpgroups):
//
//   u8* shared = ...;                          // mixes_shared_bytes(slices) bytes, aligned to 16, for nothing else
//   mixes_prefetch(m, slice, shared);          // starts the copy of the slice of fn: a weight, so before the wait
//   wait_for_dependencies();
//   mixes_slice(m, slice, shared);
//
// Float32 FMA: the model asks for float32, and 147 thousand of them (6 rows, 1024 columns) are 0.7 us of one
// multiprocessor. The order of a row's sum depends on the number of slices and of threads, on nothing else of the batch.
//
// Compiled with HIDDEN and HC.
#pragma once
#include "common.cuh"

static_assert(HC == 4, "24 coefficients: the records of partial sums hold 28 floats");

constexpr int MIX_OUTPUTS = (2 + HC) * HC;          // 24 products, the sum of squares behind them
constexpr int MIX_RECORD = 28;                      // floats per (slice, row) of `partials`; the last three are unused
constexpr int MIX_TILE = 128;                       // columns of a tile of packed fn: a warp reads 16 bytes a lane
constexpr int MIX_TILES = HC * HIDDEN / MIX_TILE;
constexpr int MIX_TILE_BYTES = MIX_OUTPUTS * MIX_TILE * 4;
constexpr int MIX_GROUPS = 4;                       // warps that share columns: 6 outputs each
constexpr int MIX_GROUP = MIX_OUTPUTS / MIX_GROUPS;
constexpr int MIX_ROWS = 6;                         // rows at a time: 36 sums a lane, no spills at 512 threads
constexpr int MIX_PARTS = 4;                        // at most: 16 warps / MIX_GROUPS

struct Mixes {
  const bf16* stream;  // [rows][HC * HIDDEN]
  const float* fn;     // packed by boundary.cuda.pack_fn: [MIX_TILES][24][128]
  float* partials;     // [slices][rows][28]
  int slices;          // 1..MIX_TILES
  int rows;
};

// Shared memory of a block that works on one of `slices` slices: fn, partial sums of the warps, a barrier.
DEVICE constexpr int mixes_fn_bytes(int slices) { return (MIX_TILES + slices - 1) / slices * MIX_TILE_BYTES; }
constexpr int MIX_SUMS_BYTES = MIX_PARTS * MIX_ROWS * MIX_RECORD * 4;
DEVICE constexpr int mixes_shared_bytes(int slices) { return mixes_fn_bytes(slices) + MIX_SUMS_BYTES + 16; }
DEVICE int mixes_first_tile(const Mixes& m, int slice) { return slice * MIX_TILES / m.slices; }

// Start the copy of fn. Called once per kernel by every thread (one of them does the work).
DEVICE void mixes_prefetch(const Mixes& m, int slice, u8* shared) {
  if (threadIdx.x == 0) {
    u64* barrier = (u64*)(shared + mixes_fn_bytes(m.slices) + MIX_SUMS_BYTES);
    int first = mixes_first_tile(m, slice), tiles = mixes_first_tile(m, slice + 1) - first;
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, (u32)(tiles * MIX_TILE_BYTES));
    for (int t = 0; t < tiles; ++t)
      bulk_copy(shared + t * MIX_TILE_BYTES, (const u8*)m.fn + (i64)(first + t) * MIX_TILE_BYTES, MIX_TILE_BYTES, barrier);
  }
}

// Products of rows first_row .. first_row + ROWS - 1; those from end_row on are not stored.
template <int ROWS> DEVICE void mixes_rows(const Mixes& m, int slice, u8* shared, int first_row, int end_row) {
  constexpr int VALUES = (MIX_GROUP * ROWS + 7) / 8 * 8;  // per lane; folded three times by halves
  const float* fn = (const float*)shared;
  float* sums = (float*)(shared + mixes_fn_bytes(m.slices));  // [part][row][record]
  int group = warp_id() % MIX_GROUPS, part = warp_id() / MIX_GROUPS, parts = (int)blockDim.x / (32 * MIX_GROUPS);
  int first = mixes_first_tile(m, slice), tiles = mixes_first_tile(m, slice + 1) - first;

  float values[VALUES];  // [row][output of the group]
#pragma unroll
  for (int i = 0; i < VALUES; ++i) values[i] = 0.0f;
  float squares[(ROWS + MIX_GROUPS - 1) / MIX_GROUPS];  // of rows group, group + 4
#pragma unroll
  for (int i = 0; i < (ROWS + MIX_GROUPS - 1) / MIX_GROUPS; ++i) squares[i] = 0.0f;

  const bf16* stream = m.stream + (i64)first * MIX_TILE + lane_id() * 4;
  const bf16* row[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int number = first_row + r < end_row ? first_row + r : first_row;
    row[r] = stream + (i64)number * (HC * HIDDEN);
  }
#pragma unroll 2
  for (int t = part; t < tiles; t += parts) {
    float x[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      uint2 pairs = load_l2((const uint2*)(row[r] + t * MIX_TILE));
      x[r][0] = bf16x2_low(pairs.x), x[r][1] = bf16x2_high(pairs.x);
      x[r][2] = bf16x2_low(pairs.y), x[r][3] = bf16x2_high(pairs.y);
      if (r % MIX_GROUPS == group)
#pragma unroll
        for (int c = 0; c < 4; ++c) squares[r / MIX_GROUPS] = fmaf(x[r][c], x[r][c], squares[r / MIX_GROUPS]);
    }
    const float4* w = (const float4*)fn + (t * MIX_OUTPUTS + group * MIX_GROUP) * (MIX_TILE / 4) + lane_id();
#pragma unroll
    for (int o = 0; o < MIX_GROUP; ++o) {
      float4 f = w[o * (MIX_TILE / 4)];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float& v = values[r * MIX_GROUP + o];
        v = fmaf(x[r][0], f.x, v), v = fmaf(x[r][1], f.y, v), v = fmaf(x[r][2], f.z, v), v = fmaf(x[r][3], f.w, v);
      }
    }
  }

  // Sum over lanes. Three times, a lane keeps one half of the values and hands the other half to its partner, so that
  // lanes 4 i .. 4 i + 3 end with VALUES / 8 values, those from i * VALUES / 8: 45 shuffles for 36 values, not 180.
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    int half = VALUES >> (step + 1);
    bool upper = lane_id() & (16 >> step);
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i)
      if (i < half) {
        float kept = upper ? values[half + i] : values[i], given = upper ? values[i] : values[half + i];
        values[i] = kept + shuffle_xor(given, 16 >> step);
      }
  }
#pragma unroll
  for (int i = 0; i < VALUES / 8; ++i) {
    float v = values[i] + shuffle_xor(values[i], 2);
    v += shuffle_xor(v, 1);
    int which = lane_id() / 4 * (VALUES / 8) + i;
    if (lane_id() % 4 == 0 && which < MIX_GROUP * ROWS)
      sums[(part * MIX_ROWS + which / MIX_GROUP) * MIX_RECORD + group * MIX_GROUP + which % MIX_GROUP] = v;
  }
#pragma unroll
  for (int i = 0; i < (ROWS + MIX_GROUPS - 1) / MIX_GROUPS; ++i) {
    float v = warp_sum(squares[i]);
    if (lane_id() == 0 && i * MIX_GROUPS + group < ROWS)
      sums[(part * MIX_ROWS + i * MIX_GROUPS + group) * MIX_RECORD + MIX_OUTPUTS] = v;
  }
  sync_block();
  for (int i = threadIdx.x; i < ROWS * MIX_RECORD; i += blockDim.x) {
    int r = i / MIX_RECORD, o = i % MIX_RECORD;
    if (first_row + r < end_row && o <= MIX_OUTPUTS) {
      float v = 0.0f;
      for (int part_ = 0; part_ < parts; ++part_) v += sums[(part_ * MIX_ROWS + r) * MIX_RECORD + o];
      m.partials[((i64)slice * m.rows + first_row + r) * MIX_RECORD + o] = v;
    }
  }
}

// The slice for rows first_row .. end_row - 1; all rows where not given. After wait_for_dependencies.
DEVICE void mixes_slice(const Mixes& m, int slice, u8* shared, int first_row, int end_row) {
  sync_block();  // the barrier is initialized
  barrier_wait((u64*)(shared + mixes_fn_bytes(m.slices) + MIX_SUMS_BYTES), 0);
  for (int row = first_row; row < end_row; row += MIX_ROWS) {
    int left = end_row - row;
    if (row > first_row) sync_block();  // the sums of the previous rows are read
    if (left <= 1) mixes_rows<1>(m, slice, shared, row, end_row);
    else mixes_rows<MIX_ROWS>(m, slice, shared, row, end_row);
  }
}
DEVICE void mixes_slice(const Mixes& m, int slice, u8* shared) { mixes_slice(m, slice, shared, 0, m.rows); }
