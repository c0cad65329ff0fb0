// The dot products behind a sublayer's mixing coefficients, as a part that other kernels run on spare blocks.
//
// For every row of the stream: 24 products of its hc * hidden columns with fn, and the sum of their squares. The
// columns are cut into slices of at most 512; the boundary that follows adds the slices in order and makes the
// coefficients of the sums (boundary.cu). A block calls, with all its threads (256 or more; 8 warps work):
//
//   u8* shared = ...;                               // MIX_SHARED_BYTES, aligned to 16, for nothing else
//   mixes_block(m, i, blocks, shared);              // slices i, i + blocks, ..; it waits for dependencies itself
//
// Bound by latency: behind the wait there is one trip to L2 for 64 columns of the rows, tensor cores, one exchange
// through shared memory, one store. A warp's 64 columns of fn are in its registers before the wait, each float32 as a
// sum of three bf16 (exactly: 3 x 8 bits), so that the products are exact and the sums are those of float32. The order
// of a row's sum depends on the number of slices, on nothing else of the batch.
//
// Compiled with HIDDEN and HC.
#pragma once
#include "common.cuh"

static_assert(HC == 4, "24 coefficients: three times the 8 rows of a core matrix, and records of 28 floats");

constexpr int MIX_OUTPUTS = (2 + HC) * HC;  // 24 products, the sum of squares behind them
constexpr int MIX_RECORD = 28;              // floats per (row, slice) of `partials`; the last three are unused
constexpr int MIX_WARPS = 8;
constexpr int MIX_CHUNK = 64;               // columns of a warp
constexpr int MIX_CHUNKS = HC * HIDDEN / MIX_CHUNK;
constexpr int MIX_STEPS = MIX_CHUNK / 16;   // products of 16 columns
constexpr int MIX_THIRDS = MIX_OUTPUTS / 8;
constexpr int MIX_CHUNK_FLOATS = MIX_CHUNK * MIX_OUTPUTS;
constexpr int MIX_SUMS = MIX_WARPS * 8 * MIX_RECORD;   // floats: of the warps, for 8 rows
constexpr int MIX_SHARED_BYTES = 2 * MIX_SUMS * 4;     // in turn

struct Mixes {
  const bf16* stream;  // [rows][HC * HIDDEN]
  const float* fn;     // packed by boundary.cuda.pack_fn: [MIX_CHUNKS][MIX_STEPS][3][32 lanes][4]
  float* partials;     // [rows][slices][28]
  int slices;          // MIX_CHUNKS / 8 .. MIX_CHUNKS
  int rows;
};

// fn of a warp's columns: three bf16 parts of each value, the largest first.
struct MixWeights {
  u32 part[3][MIX_STEPS][MIX_THIRDS][2];  // outputs lane / 4 of each third; columns in pairs (mma's a0 and a2)
};

// Two floats as three pairs of bf16 whose sums they are: each is what the 8 leading bits left by the one before are.
DEVICE void mixes_split(float low, float high, u32& first, u32& second, u32& third) {
  first = permute_bytes(as_bits(low), as_bits(high), 0x7632);
  low -= as_float(as_bits(low) & 0xFFFF0000u), high -= as_float(as_bits(high) & 0xFFFF0000u);
  second = permute_bytes(as_bits(low), as_bits(high), 0x7632);
  low -= as_float(as_bits(low) & 0xFFFF0000u), high -= as_float(as_bits(high) & 0xFFFF0000u);
  third = permute_bytes(as_bits(low), as_bits(high), 0x7632);
}

DEVICE void mixes_load(MixWeights& w, const Mixes& m, int chunk) {
  const float* from = m.fn + (i64)chunk * MIX_CHUNK_FLOATS + lane_id() * 4;
  uint4 values[MIX_STEPS][MIX_THIRDS];
#pragma unroll
  for (int i = 0; i < MIX_STEPS * MIX_THIRDS; ++i) values[i / MIX_THIRDS][i % MIX_THIRDS] = load_stream(from + i * 128);
#pragma unroll
  for (int s = 0; s < MIX_STEPS; ++s)
#pragma unroll
    for (int t = 0; t < MIX_THIRDS; ++t) {
      uint4 v = values[s][t];
      mixes_split(as_float(v.x), as_float(v.y), w.part[0][s][t][0], w.part[1][s][t][0], w.part[2][s][t][0]);
      mixes_split(as_float(v.z), as_float(v.w), w.part[0][s][t][1], w.part[1][s][t][1], w.part[2][s][t][1]);
    }
}

// Products of a warp's columns `x` of 8 rows, to sums [8 rows][28]. Words 2 s, 2 s + 1: the lane's columns of step s.
DEVICE void mixes_multiply(const MixWeights& w, const u32 (&x)[2 * MIX_STEPS], float* sums) {
  int output = lane_id() / 4, row = lane_id() % 4 * 2;
  float* to = sums + row * MIX_RECORD + output;
  float outer[2][4];  // outputs 0..15: of the first parts, and of the two smaller ones
#pragma unroll
  for (int i = 0; i < 8; ++i) outer[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int s = 0; s < MIX_STEPS; ++s)
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const u32(&a)[MIX_THIRDS][2] = w.part[i][s];
      mma_bf16(outer[(i + 1) / 2], a[0][0], a[1][0], a[0][1], a[1][1], x[2 * s], x[2 * s + 1]);
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i % 2 * MIX_RECORD + i / 2 * 8] = outer[0][i] + outer[1][i];

  // Outputs 16..23: two parts in one tile. In the place of a fourth part is x itself: a row's squares are summed on the
  // diagonal.
  float inner[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) inner[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int s = 0; s < MIX_STEPS; ++s) {
    u32 b0 = x[2 * s], b1 = x[2 * s + 1];
    mma_bf16(inner[0], w.part[0][s][2][0], w.part[1][s][2][0], w.part[0][s][2][1], w.part[1][s][2][1], b0, b1);
    mma_bf16(inner[1], w.part[2][s][2][0], b0, w.part[2][s][2][1], b1, b0, b1);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[i * MIX_RECORD + 16] = inner[0][i] + (inner[0][i + 2] + inner[1][i]);
    if (output == row + i) to[i * MIX_RECORD + MIX_OUTPUTS - output] = inner[1][i + 2];
  }
}

// A slice, for rows first_row .. end_row - 1. `turn` counts exchanges through `sums`; `wait` loads fn, then waits.
template <class Wait>
DEVICE void mixes_slice(const Mixes& m, int slice, float* sums, int first_row, int end_row, int& turn, Wait wait) {
  int warp = warp_id(), lane = lane_id(), first = slice * MIX_CHUNKS / m.slices, chunk = first + warp;
  bool works = warp < MIX_WARPS && chunk < (slice + 1) * MIX_CHUNKS / m.slices;
  MixWeights w;
  if (works) mixes_load(w, m, chunk);
  wait();
  // A lane's columns: 16 bytes of each half of the warp's, so that four lanes read whole sectors.
  const bf16* from = m.stream + (i64)(first_row + lane / 4) * (HC * HIDDEN) + chunk * MIX_CHUNK + lane % 4 * 8;
  uint4 x[2];
  auto load = [&](int row) {
    x[0] = x[1] = make_uint4(0, 0, 0, 0);
    if (works && row + lane / 4 < end_row) x[0] = load_l2((const uint4*)from), x[1] = load_l2((const uint4*)from + 4);
    from += 8 * HC * HIDDEN;
  };
  load(first_row);
#pragma unroll 1
  for (int row = first_row; row < end_row; row += 8, turn ^= 1) {
    float* mine = sums + turn * MIX_SUMS + warp * (8 * MIX_RECORD);
    if (works) mixes_multiply(w, {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w}, mine);
    else if (warp < MIX_WARPS)
      for (int i = lane; i < 8 * MIX_RECORD; i += 32) mine[i] = 0.0f;
    if (row + 8 < end_row) load(row + 8);
    sync_block();
    int i = (int)threadIdx.x, output = i % MIX_RECORD, its_row = row + i / MIX_RECORD;
    if (i < 8 * MIX_RECORD && its_row < end_row && output <= MIX_OUTPUTS) {
      float total = sums[turn * MIX_SUMS + i];
#pragma unroll
      for (int other = 1; other < MIX_WARPS; ++other) total += sums[turn * MIX_SUMS + other * (8 * MIX_RECORD) + i];
      m.partials[(u32)(its_row * m.slices + slice) * MIX_RECORD + output] = total;
    }
  }
}

// Slices first_slice, first_slice + stride, .. of all rows.
DEVICE void mixes_block(const Mixes& m, int first_slice, int stride, u8* shared) {
  int turn = 0;
  mixes_slice(m, first_slice, (float*)shared, 0, m.rows, turn, [&] {
    int then = first_slice + stride, chunk = then * MIX_CHUNKS / m.slices;  // its fn comes meanwhile
    if (then < m.slices && threadIdx.x == 0)
      prefetch_l2(m.fn + (i64)chunk * MIX_CHUNK_FLOATS,
                  ((then + 1) * MIX_CHUNKS / m.slices - chunk) * MIX_CHUNK_FLOATS * 4);
    wait_for_dependencies();
  });
#pragma unroll 1
  for (int slice = first_slice + stride; slice < m.slices; slice += stride)
    mixes_slice(m, slice, (float*)shared, 0, m.rows, turn, [] {});
}
