// What the kernels of a choice share: which entries a row may choose from, and the plan of the score scratch.
//
// A row's eligible entries are numbered 0..eligible - 1: in an index source that chooses from all, the entries
// themselves; in a consumer of candidates, the entries of its candidate blocks in ascending order. Rows of one request
// are scored together, up to GROUP_ROWS at a time, so that a key is read and decoded once for all of them.
#pragma once
#include "common.cuh"

// Constants: ROLE, RATIO, TOPK, CANDIDATE_BLOCKS, BLOCK_ENTRIES.
constexpr int PLAIN = 0, SOURCE = 1, CONSUMER = 2;   // no candidate level; marks candidates; chooses inside them
constexpr int GROUP_ROWS = ROLE == CONSUMER ? 1 : 8;  // consumers choose among blocks of their own, row by row
constexpr int TILE = 32;                              // entries that a warp scores at once
constexpr int DECODE_COST = 2;                        // of a tile, in units of scoring it for one row
static_assert(BLOCK_ENTRIES == 2 || BLOCK_ENTRIES == 4 || BLOCK_ENTRIES == 8, "a block lies in 8 lanes");

// Rows that are scored together. In the scratch, row first + i has its keys at offset + i * stride, its block keys at
// that divided by BLOCK_ENTRIES; a row needs whole tiles.
struct alignas(16) Group {
  i32 first, rows;   // row numbers
  i32 extent;        // eligible entries of the row that has most
  i32 slot;
  i32 cost;          // of all groups before this one
  i32 wave;          // groups of a wave share the scratch; waves are launched one after another
  i32 offset, stride;
};
struct alignas(16) Header { i32 groups, cost, unused[6]; };

DEVICE int blocks_of(int entries) { return (entries + BLOCK_ENTRIES - 1) / BLOCK_ENTRIES; }
DEVICE int visible_entries(int position, int slot) { return slot < 0 ? 0 : (position + 1) / RATIO; }
// Only the newest block may be partly visible, and it is always a candidate.
DEVICE int eligible_entries(int visible) {
  int left_out = blocks_of(visible) - CANDIDATE_BLOCKS;
  return ROLE == CONSUMER && left_out > 0 ? visible - left_out * BLOCK_ENTRIES : visible;
}
// Entry behind an eligible number of a row that chooses inside its candidate blocks.
DEVICE i32 candidate_entry(const i32* candidates, int row, int number) {
  i32 block = load_l2(candidates + (i64)row * CANDIDATE_BLOCKS + number / BLOCK_ENTRIES);
  return block * BLOCK_ENTRIES + number % BLOCK_ENTRIES;
}
// Whether the row's choice depends on scores at all.
DEVICE bool needs_scores(int visible) {
  return eligible_entries(visible) > TOPK || (ROLE == SOURCE && blocks_of(visible) > CANDIDATE_BLOCKS);
}

// Inclusive sum over the block's threads, in order. `totals` [32] is shared memory, free again after the next barrier.
template <int THREADS> DEVICE int scan_block(int value, int* totals) {
  int lane = lane_id(), warp = warp_id(), sum = value;
#pragma unroll
  for (int delta = 1; delta < 32; delta <<= 1) {
    int below = shuffle_up(sum, delta);
    if (lane >= delta) sum += below;
  }
  if (lane == 31) totals[warp] = sum;
  sync_block();
  int before = lane < THREADS / 32 ? totals[lane] : 0;
#pragma unroll
  for (int delta = 1; delta < 32; delta <<= 1) {
    int below = shuffle_up(before, delta);
    if (lane >= delta) before += below;
  }
  before = shuffle(before, (warp + 31) % 32);
  return warp ? before + sum : sum;
}
