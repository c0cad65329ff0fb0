// Skinny products whose weights are many times what the shared memories hold: persistent blocks, one warp that keeps a
// ring of stages full, eight that multiply.
//
// A block owns a run of tiles and takes them in rounds of at most TILES. A round streams K in stages of STAGE_GROUPS
// groups: the weights of the round's tiles and the activations of all rows, which are small and come from L2.
// 8 / TILES warps share a tile, each with its part of every stage. Weights are asked for before the activations may be
// looked at.
//
// Compiled with COLUMNS, KIND, OUTPUTS, FORM, STRIDE, COLUMN, PEERS, SQUARES (0), ROW_TILES, TILES, STAGE_GROUPS, STAGES, SHARED.
#include "dense/operands.cuh"
#include "dense/output.cuh"

constexpr int CONSUMERS = 8;                // warps
constexpr int PARTS = CONSUMERS / TILES;    // warps of a tile
constexpr int PRODUCER = CONSUMERS;         // the warp behind them
constexpr int OUTPUT_TILES = (OUTPUTS + 15) / 16;
constexpr int ROUND_STAGES = (GROUPS + STAGE_GROUPS - 1) / STAGE_GROUPS;
constexpr int TILE_BYTES = STAGE_GROUPS * group_bytes(KIND);
constexpr int X_BYTES = STAGE_GROUPS * fragment_bytes(KIND);  // of 8 rows
constexpr int X_SCALE_BYTES = KIND == FP8 ? STAGE_GROUPS * 8 : 0;
constexpr int STAGE_BYTES = TILES * TILE_BYTES + ROW_TILES * (X_BYTES + X_SCALE_BYTES);
constexpr int SUMS_STRIDE = 20;
constexpr int SUMS_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = SUMS_AT + CONSUMERS * 8 * SUMS_STRIDE * 4;
static_assert(SHARED >= BARRIERS_AT + 16 * STAGES, "cuda.py counts shared memory as this file does");
static_assert(TILES * PARTS == CONSUMERS && STAGE_GROUPS % PARTS == 0, "warps divide a stage");
static_assert(KIND != FP8 || GROUPS % 2 == 0, "scales of activations are copied by 16 bytes");
static_assert(KIND == BF16 || STAGE_GROUPS % 4 == 0, "scales are copied by 16 bytes");
static_assert(!takes_groups(FORM), "a warp holds 16 outputs");
static_assert(TILES + ROW_TILES <= 32, "a lane of the producer per tile of weights or rows");

struct Run { int first, count, rounds; };  // tiles of a block

DEVICE Run run_of(int block, int blocks) {
  int first = (int)((i64)OUTPUT_TILES * block / blocks), end = (int)((i64)OUTPUT_TILES * (block + 1) / blocks);
  Run r = {first, end - first, (end - first + TILES - 1) / TILES};
  return r;
}
// Rounds are of nearly equal size: first tile of a round, counted in the run.
DEVICE int round_start(const Run& r, int round) { return r.rounds ? r.count * round / r.rounds : 0; }

// The copies of a stage: lane t < TILES brings the weights of tile t, lane TILES + j the rows 8 j .. 8 j + 7.
DEVICE void copy_weights(const u8* weight, const Run& r, int step, u8* stage, u64* full, u64 policy) {
  int round = step / ROUND_STAGES, first = step % ROUND_STAGES * STAGE_GROUPS, lane = lane_id();
  int tile = round_start(r, round) + lane;
  if (tile >= round_start(r, round + 1)) return;
  int groups = min(STAGE_GROUPS, packed_groups(KIND) - first);
  const u8* from = weight + (i64)(r.first + tile) * packed_groups(KIND) * group_bytes(KIND);
  u8* to = stage + lane * TILE_BYTES;
  bulk_copy(to, from + first * unit_bytes(KIND), groups * unit_bytes(KIND), full, policy);
  const u8* scales = from + packed_groups(KIND) * unit_bytes(KIND) + first * 4;
  if (KIND != BF16) bulk_copy(to + STAGE_GROUPS * unit_bytes(KIND), scales, groups * 4, full, policy);
}
DEVICE void copy_activations(const u8* x, const u8* scales, int row_tiles, int step, u8* stage, u64* full) {
  int first = step % ROUND_STAGES * STAGE_GROUPS, groups = min(STAGE_GROUPS, GROUPS - first), j = lane_id() - TILES;
  if (j < 0 || j >= row_tiles) return;
  u8* to = stage + TILES * TILE_BYTES;
  i64 group = (i64)j * GROUPS + first;
  bulk_copy(to + j * X_BYTES, x + group * fragment_bytes(KIND), groups * fragment_bytes(KIND), full);
  if (KIND == FP8) bulk_copy(to + ROW_TILES * X_BYTES + j * X_SCALE_BYTES, scales + group * 8, groups * 8, full);
}
DEVICE u32 stage_bytes(const Run& r, int row_tiles, int step) {
  int round = step / ROUND_STAGES, first = step % ROUND_STAGES * STAGE_GROUPS;
  int tiles = round_start(r, round + 1) - round_start(r, round);
  int weights = min(STAGE_GROUPS, packed_groups(KIND) - first) * group_bytes(KIND);
  int activations = min(STAGE_GROUPS, GROUPS - first) * (fragment_bytes(KIND) + (KIND == FP8 ? 8 : 0));
  return (u32)(tiles * weights + row_tiles * activations);
}

KERNEL(stream, Stream, (CONSUMERS + 1) * 32, 1) {
  launch_dependents();
  u8* shared = shared_memory();
  u64* full = (u64*)(shared + BARRIERS_AT);
  u64* empty = full + STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, CONSUMERS);
    }
    barrier_init_fence();
  }
  sync_block();
  Run run = run_of((int)blockIdx.x, (int)gridDim.x);
  int steps = run.rounds * ROUND_STAGES, row_tiles = (p.rows + 7) / 8, warp = warp_id(), lane = lane_id();

  if (warp == PRODUCER) {
    u64 policy = evict_first_policy();
    int ahead = min(STAGES, steps);
    for (int step = 0; step < ahead; ++step) {
      if (lane == 0) barrier_expect(full + step, stage_bytes(run, row_tiles, step));
      sync_warp();
      copy_weights(p.weight, run, step, shared + step * STAGE_BYTES, full + step, policy);
    }
    wait_for_dependencies();
    for (int step = 0; step < ahead; ++step)
      copy_activations((const u8*)p.x, p.x_scales, row_tiles, step, shared + step * STAGE_BYTES, full + step);
    for (int step = ahead; step < steps; ++step) {
      int stage = step % STAGES;
      barrier_wait(empty + stage, (step / STAGES - 1) & 1);
      if (lane == 0) barrier_expect(full + stage, stage_bytes(run, row_tiles, step));
      sync_warp();
      copy_weights(p.weight, run, step, shared + stage * STAGE_BYTES, full + stage, policy);
      copy_activations((const u8*)p.x, p.x_scales, row_tiles, step, shared + stage * STAGE_BYTES, full + stage);
    }
    return;
  }

  wait_for_dependencies();
  constexpr int SETS = KIND == BF16 && ROW_TILES < 4 ? 4 / ROW_TILES : 1;
  int tile = warp % TILES, part = warp / TILES;
  float* sums = (float*)(shared + SUMS_AT);  // [warp][8 rows][SUMS_STRIDE]
  Place place = {FORM, p.out, nullptr, OUTPUTS, STRIDE, COLUMN};
  int stage = 0;
  u32 parity = 0;
  for (int round = 0; round < run.rounds; ++round) {
    int first_tile = round_start(run, round), tiles = round_start(run, round + 1) - first_tile;
    float acc[SETS][ROW_TILES][4];
#pragma unroll
    for (int i = 0; i < SETS * ROW_TILES * 4; ++i) acc[i / (ROW_TILES * 4)][i / 4 % ROW_TILES][i % 4] = 0.0f;

    for (int step = 0; step < ROUND_STAGES; ++step) {
      const u8* weights = shared + stage * STAGE_BYTES + tile * TILE_BYTES;
      const float* scales = (const float*)(weights + STAGE_GROUPS * unit_bytes(KIND));
      const u8* x = shared + stage * STAGE_BYTES + TILES * TILE_BYTES;
      const u8* x_scales = x + ROW_TILES * X_BYTES;
      int groups = min(STAGE_GROUPS, GROUPS - step * STAGE_GROUPS);
      barrier_wait(full + stage, parity);
      if (tile < tiles)
#pragma unroll
        for (int i = 0; i < STAGE_GROUPS / PARTS; ++i) {
          int g = i * PARTS + part;
          if (GROUPS % STAGE_GROUPS != 0 && g >= groups) continue;
          Unit unit;
          Operand w;
          read_unit<KIND>(unit, weights + g * unit_bytes(KIND) + lane * 16);
          float scale = KIND == BF16 ? 1.0f : scales[g];
          decode_unit<KIND>(w, unit, scale);
#pragma unroll
          for (int j = 0; j < ROW_TILES; ++j) {
            Activations a;
            Columns columns;
            if (j >= row_tiles) continue;
            load_activations<KIND, false>(a, x + j * X_BYTES + g * fragment_bytes(KIND) + lane_offset<KIND>());
            load_scales<KIND, false>(a, x_scales + j * X_SCALE_BYTES + g * 8 + scales_offset());
            decode_activations<KIND>(columns, a);
            multiply<KIND>(acc[i % SETS][j], w, scale, columns);
          }
        }
      sync_warp();
      if (lane == 0) barrier_arrive(empty + stage);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }

    // The parts of a tile meet 8 rows at a time; the first of its warps adds them in order and stores.
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) {
      if (j >= row_tiles) continue;
#pragma unroll
      for (int set = 1; set < SETS; ++set)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][j][i] += acc[set][j][i];
      store_accumulators(sums + warp * 8 * SUMS_STRIDE, SUMS_STRIDE, acc[0][j]);
      if (PARTS > 1) sync_some(1, CONSUMERS * 32);
      else sync_warp();
      if (part == 0) {
        int row = lane / 4, quad = lane % 4;
        float4 v = *(const float4*)(sums + (tile * 8 + row) * SUMS_STRIDE + quad * 4);
#pragma unroll
        for (int other = 1; other < PARTS; ++other) {
          float4 u = *(const float4*)(sums + ((other * TILES + tile) * 8 + row) * SUMS_STRIDE + quad * 4);
          v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
        }
        int output = (run.first + first_tile + tile) * 16 + quad * 4;
        emit(p, place, tile < tiles && j * 8 + row < p.rows, j * 8 + row, output, v);
      }
      if (PARTS > 1) sync_some(1, CONSUMERS * 32);
      else sync_warp();
    }
  }
}
