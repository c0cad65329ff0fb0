// Routing of more than 8 rows: `route` chooses for each row; `gather` makes, in every block alike, the list of pairs
// (an expert and up to 8 of its rows), and copies the activations of each pair into an operand tile of its own.
#include "moe/route.cuh"

constexpr int MASKS = (MAX_ROWS + 31) / 32;  // words of a set of rows
constexpr int OPERAND = 9 * HIDDEN;
static_assert(EXPERTS <= GATHER_THREADS, "a thread for each expert");

KERNEL(route, Route, 256, 1) {
  launch_dependents();
  int lane = lane_id(), row = blockIdx.x * 8 + warp_id();
  float bias[PER_LANE];
  load_lane(bias, p.bias, lane);
  wait_for_dependencies();
  if (row >= p.rows) return;
  float score[PER_LANE];
  load_lane(score, p.scores + row * EXPERTS, lane);
  route_row(score, bias, load_l2(p.row_slot + row) >= 0, row, p.chosen, p.chosen_weights);
}

struct Shared {
  u32 masks[EXPERTS][MASKS];  // the rows that chose an expert
  int first_pair[EXPERTS];
  int totals[32];
  int pairs;
  int rows[1];  // [shared and routed pairs][8], -1: none
};

// Inclusive sum over the block's threads, in order.
DEVICE int scan(int value, int* totals) {
  int lane = lane_id(), warp = warp_id();
#pragma unroll
  for (int delta = 1; delta < 32; delta <<= 1) {
    int below = shuffle_up(value, delta);
    if (lane >= delta) value += below;
  }
  if (lane == 31) totals[warp] = value;
  sync_block();
  for (int w = 0; w < warp; w++) value += totals[w];
  return value;
}

KERNEL(gather, Gather, GATHER_THREADS, 1) {
  launch_dependents();
  Shared& s = *(Shared*)shared_memory();
  int tid = threadIdx.x;
  const int shared_pairs = (p.rows + 7) / 8;
  for (int i = tid; i < EXPERTS * MASKS; i += GATHER_THREADS) (&s.masks[0][0])[i] = 0;
  for (int i = tid; i < shared_pairs * 8; i += GATHER_THREADS) s.rows[i] = i < p.rows ? i : -1;
  sync_block();
  wait_for_dependencies();
  for (int i = tid; i < p.rows * TOP_K; i += GATHER_THREADS) {
    int expert = load_l2(p.chosen + i), row = i / TOP_K;
    if (expert >= 0) add_atomic(&s.masks[expert][row >> 5], 1u << (row & 31));  // a row names an expert once
  }
  sync_block();
  int count = 0;
  if (tid < EXPERTS)
    for (int i = 0; i < MASKS; i++) count += count_bits(s.masks[tid][i]);
  int pairs = (count + 7) / 8, end = scan(pairs, s.totals);
  if (tid < EXPERTS) {
    s.first_pair[tid] = end - pairs;
    for (int i = 0; i < pairs * 8; i++) {
      int place = (shared_pairs + end - pairs) * 8 + i;
      if (i >= count) s.rows[place] = -1;
      if (blockIdx.x == 0 && i >= count) p.pair_weights[place] = 0.0f;
      if (blockIdx.x == 0 && i % 8 == 0) p.list[4 + end - pairs + i / 8] = tid;
    }
  }
  if (tid == GATHER_THREADS - 1) {
    s.pairs = end;
    if (blockIdx.x == 0) p.list[0] = end;
  }
  sync_block();
  for (int i = tid; i < p.rows * TOP_K; i += GATHER_THREADS) {
    int expert = load_l2(p.chosen + i), row = i / TOP_K, before = 0;
    if (expert < 0) continue;
    for (int w = 0; w < (row >> 5); w++) before += count_bits(s.masks[expert][w]);
    before += count_bits(s.masks[expert][row >> 5] & ((1u << (row & 31)) - 1u));
    int place = (shared_pairs + s.first_pair[expert]) * 8 + before;
    s.rows[place] = row;
    if (blockIdx.x == 0) p.pair_weights[place] = load_l2(p.chosen_weights + i);
  }
  sync_block();
  const int all = shared_pairs + s.pairs;
  const int threads = gridDim.x * GATHER_THREADS, thread = blockIdx.x * GATHER_THREADS + tid;
  if (blockIdx.x == 0)
    for (int i = tid; i < all * 8; i += GATHER_THREADS) p.pair_rows[i] = s.rows[i];
  for (int i = thread; i < all * (HIDDEN / 2); i += threads) {  // 16 bytes of codes each
    int pair = i / (HIDDEN / 2), rest = i % (HIDDEN / 2), row = s.rows[pair * 8 + (rest & 7)];
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (row >= 0) codes = load_l2((const uint4*)(p.x_codes + fragment_offset(row, (rest >> 3) * 16, HIDDEN / 16)));
    *(uint4*)(p.operands + (i64)pair * OPERAND + rest * 16) = codes;
  }
  for (int i = thread; i < all * (HIDDEN / 16); i += threads) {  // four scales each: of rows 0..3 or 4..7 of a group
    int pair = i / (HIDDEN / 16), rest = i % (HIDDEN / 16);
    float scales[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int row = s.rows[pair * 8 + (rest & 1) * 4 + j];
      const u32* words = (const u32*)p.x_scales + ((row >> 3) * (HIDDEN / 32) + (rest >> 1)) * 2 + ((row >> 2) & 1);
      u32 word = row < 0 ? 0 : load_l2(words);
      scales[j] = row < 0 ? 0.0f : ue8m0_to_f32((word >> 8 * (row & 3)) & 255u);
    }
    float4* to = (float4*)(p.operands + (i64)pair * OPERAND + 8 * HIDDEN) + rest;
    *to = make_float4(scales[0], scales[1], scales[2], scales[3]);
  }
}
