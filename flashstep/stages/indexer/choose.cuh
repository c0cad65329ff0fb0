// What the kernels of a choice share: which entries a row may choose from, and the plan of the score scratch.
//
// A row's eligible entries are numbered 0..eligible - 1: in an index source that chooses from all, the entries
// themselves; in a consumer of candidates, the entries of its candidate blocks in ascending order. Rows of one request
// are scored together, up to GROUP_ROWS at a time, so that a key is read and decoded once for all of them.
//
// The plan follows from positions and slots alone. Every block makes it for itself, before its turn where it may: there
// is no kernel that prepares, and nothing to read behind the wait.
#pragma once
#include "common.cuh"

// Constants: ROLE, RATIO, TOPK, CANDIDATE_BLOCKS, BLOCK_ENTRIES.
constexpr int PLAIN = 0, SOURCE = 1, CONSUMER = 2;   // no candidate level; marks candidates; chooses inside them
constexpr int GROUP_ROWS = ROLE == CONSUMER ? 1 : 8;  // consumers choose among blocks of their own, row by row
constexpr int TILE = 32;                              // entries that a warp scores at once
constexpr int DECODE_COST = 2;                        // of a tile, in units of scoring it for one row
constexpr int MAX_ROWS = 256;
static_assert(BLOCK_ENTRIES == 2 || BLOCK_ENTRIES == 4 || BLOCK_ENTRIES == 8, "a block lies in 8 lanes");

// Rows that are scored together. In the scratch, row first + i has its keys at offset + i * stride(), its block keys at
// that divided by BLOCK_ENTRIES; a row needs whole tiles.
struct Group {
  i32 first, rows;   // row numbers
  i32 extent;        // eligible entries of the row that has most
  i32 slot;
  i32 cost;          // of all groups before this one
  i32 wave;          // groups of a wave share the scratch; waves are launched one after another
  i32 offset;
  i32 old;           // numbers below this are entries that were complete before the forward
};
DEVICE int tiles_of(const Group& group) { return (group.extent + TILE - 1) / TILE; }
DEVICE int stride_of(const Group& group) { return tiles_of(group) * TILE; }

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

// Inclusive sum over the block's threads, in order; `all` is the sum of all. `totals` [32] is shared memory, free again
// after the next barrier.
template <int THREADS> DEVICE int scan_block(int value, int* totals, int& all) {
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
  all = shuffle(before, 31);
  before = shuffle(before, (warp + 31) % 32);
  return warp ? before + sum : sum;
}
template <int THREADS> DEVICE int scan_block(int value, int* totals) {
  int all;
  return scan_block<THREADS>(value, totals, all);
}

struct Plan {  // in shared memory
  Group groups[MAX_ROWS];       // in order of their rows; those that need no scores are left out
  int2 places[MAX_ROWS];        // of a row that needs scores: wave and offset
  i32 slot[MAX_ROWS], position[MAX_ROWS];
  u32 begins[MAX_ROWS / 32];    // a bit for the first row of every request
  int totals[3][32];
  int count, cost;              // groups, and what they cost
};

// The first row of the request that `row` is of.
DEVICE int first_of_request(const Plan& s, int row) {
  int word = row / 32;
  u32 bits = s.begins[word] & (~0u >> (31 - row % 32));
  while (bits == 0) bits = s.begins[--word];
  return 32 * word + 31 - leading_zeros(bits);
}

// By all threads; all see the result behind the next barrier.
template <int THREADS>
DEVICE void make_plan(Plan& s, int rows, const i32* row_position, const i32* row_slot, int wave_keys) {
  for (int base = 0; base < rows; base += THREADS) {
    int row = base + (int)threadIdx.x, slot = -1, before = -1, position = 0;
    if (row < rows) {
      slot = load_l2(row_slot + row), position = load_l2(row_position + row);
      if (row > 0) before = load_l2(row_slot + row - 1);
      s.slot[row] = slot, s.position[row] = position;
    }
    u32 begins = ballot(row < rows && (row == 0 || slot != before));
    if (row < rows && lane_id() == 0) s.begins[row / 32] = begins;
  }
  sync_block();
  int cost_before = 0, keys_before = 0, groups_before = 0;
  for (int base = 0; base < rows; base += THREADS) {
    int row = base + (int)threadIdx.x, members = 0, extent = 0, newest = 0, first = 0;
    int slot = row < rows ? s.slot[row] : -1;
    if (slot >= 0) {
      first = first_of_request(s, row);
      bool needs = false;
      if ((row - first) % GROUP_ROWS == 0)
        for (; members < GROUP_ROWS && row + members < rows && s.slot[row + members] == slot; members++) {
          int visible = visible_entries(s.position[row + members], slot);
          extent = max(extent, eligible_entries(visible)), newest = max(newest, visible);
          needs |= needs_scores(visible);
        }
      if (!needs) members = 0;
    }
    int tiles = members ? (extent + TILE - 1) / TILE : 0;
    int cost = tiles * (members + DECODE_COST), keys = tiles * TILE * members, all_cost, all_keys, all_groups;
    int cost_end = cost_before + scan_block<THREADS>(cost, s.totals[0], all_cost);
    int keys_end = keys_before + scan_block<THREADS>(keys, s.totals[1], all_keys);
    int groups_end = groups_before + scan_block<THREADS>(members > 0, s.totals[2], all_groups);
    if (members) {
      int wave = (keys_end - keys) / wave_keys, offset = (keys_end - keys) % wave_keys;
      // Numbers are ascending entries: those that this forward completes are the last ones.
      int old = extent - (newest - s.position[first] / RATIO);
      s.groups[groups_end - 1] = Group{row, members, extent, slot, cost_end - cost, wave, offset, old};
      for (int i = 0; i < members; i++) s.places[row + i] = make_int2(wave, offset + i * tiles * TILE);
    }
    cost_before += all_cost, keys_before += all_keys, groups_before += all_groups;
  }
  if (threadIdx.x == 0) s.count = groups_before, s.cost = cost_before;
}
