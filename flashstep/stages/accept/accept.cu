// Acceptance of drafts over a shard of the vocabulary: `weigh` (every row), `excess` (block verification alone) and
// `race` (the row that decides the new token). `slots.cu` commits what they find; `filter.cu` runs behind `weigh` where a
// request asks for top-k, top-p or min-p.
//
// Vocabulary shards meet only in small records that each rank writes into a slab of every peer's mailbox:
// - row records [WORLD][rows][8 words] of `weigh` and `cut`: what all of p needs (`Record`),
// - histograms [WORLD][2][rows][2][256][4 words] of `narrow`, in turns: where filters cut the ranking,
// - excess [WORLD][places][BLOCK] of `excess`: the sum over the vocabulary that block verification needs,
// - races [WORLD][places][RACE_BLOCKS][4 words] of `race`: the best of the residual, and the best of p.
// Readers merge the slabs in order, so all ranks decide alike.
//
// Compiled with VOCAB (of the shard), BLOCK (drafts a request may bring), WORLD, CLUSTER (blocks of a row), RACE_BLOCKS
// and SMALL_SHARED (bytes).
#include "accept/rows.cuh"

constexpr int STANDARD = 0, BLOCK_RULE = 1, SYNTHETIC = 2;  // cuda.RULE_CODES
static_assert(BLOCK < 32, "lanes hold rows");

constexpr int RACE_CHUNK = part_of(RACE_BLOCKS);

// ---- a row over the vocabulary ----------------------------------------------------------------------------------

struct Part {  // of a row: what one block of the cluster saw
  float max, sum, drafted;
  i32 id;
  u32 bad;
};

// A cluster per row: maximum and its token, sum of exponentials, the draft's logit.
KERNEL(weigh, Accept, THREADS, 4) {
  struct Shared {
    float value[WARPS];
    i32 id[WARPS];
    u32 bad[WARPS];
    Part part;
  };
  static_assert(sizeof(Shared) <= SMALL_SHARED, "cuda.py reserves too little");
  Shared& s = *(Shared*)shared_memory();
  launch_dependents();
  wait_for_dependencies();
  int row = blockIdx.x / CLUSTER, rank = cluster_rank(), i = row % p.rows_per_request;
  // All that is known by row alone is fetched at once, before it is known whether the row is active: what counts here
  // is the number of loads that wait for another.
  int slot = load_l2(p.row_slot + row);
  i32 draft = -1;  // that this row decides
  if (i + 1 < p.rows_per_request) {
    i32 token = load_l2(p.row_token + row + 1);
    if (load_l2(p.row_slot + row + 1) >= 0) draft = token;
  }
  int begin = rank * CHUNK, size = size_of(begin, CHUNK);
  i32 first_id = p.first_token + begin;
  const float* logits = p.logits + (i64)row * VOCAB + begin;

  constexpr int AHEAD = 4, STRIDE = 4 * THREADS;
  uint4 ahead[AHEAD];
  auto fetch = [&](int base) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      int at = base + 4 * threadIdx.x + k * STRIDE;
      if (at < size) ahead[k] = load_l2((const uint4*)(logits + at));
    }
  };
  fetch(0);
  float drafted = negative_infinity();
  if (threadIdx.x == 0 && draft >= first_id && draft - first_id < size) drafted = load_l2(logits + draft - first_id);
  if (slot < 0) return;  // with the whole cluster
  float temperature = load_l2(p.temperature + slot), inverse = inverse_of(temperature);

  float best = negative_infinity(), sum = 0;  // the sum is relative to the thread's best so far
  i32 best_id = NO_ID;
  bool bad = false;
  for (int base = 0; base < size; base += AHEAD * STRIDE) {
    uint4 now[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) now[k] = ahead[k];
    fetch(base + AHEAD * STRIDE);
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      int at = base + 4 * threadIdx.x + k * STRIDE;
      if (at >= size) break;
      float x[4] = {as_float(now[k].x), as_float(now[k].y), as_float(now[k].z), as_float(now[k].w)}, before = best;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        bad |= !is_finite(x[j]);
        if (x[j] > best) best = x[j], best_id = first_id + at + j;
      }
      if (temperature > 0) {
        if (best > before) sum *= softmax_weight(before, best, inverse);
#pragma unroll
        for (int j = 0; j < 4; j++) sum += softmax_weight(x[j], best, inverse);
      }
    }
  }
  float own_best = best;
  warp_best(best, best_id);
  bad = ballot(bad);
  if (lane_id() == 0) s.value[warp_id()] = best, s.id[warp_id()] = best_id, s.bad[warp_id()] = bad;
  sync_block();
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (beats(s.value[w], s.id[w], best, best_id)) best = s.value[w], best_id = s.id[w];
    bad |= s.bad[w] != 0;
  }
  if (temperature > 0) sum = block_sum(s.value, sum > 0 ? sum * softmax_weight(own_best, best, inverse) : 0.0f);
  if (threadIdx.x == 0) s.part = Part{best, sum, drafted, best_id, bad};
  cluster_sync();
  if (rank == 0 && threadIdx.x == 0) {
    Part whole = s.part;
#pragma unroll
    for (int r = 1; r < CLUSTER; r++) {
      Part other = *cluster_map(&s.part, r);
      if (beats(other.max, other.id, whole.max, whole.id)) whole.max = other.max, whole.id = other.id;
      whole.bad |= other.bad;
      whole.drafted = fmaxf(whole.drafted, other.drafted);
    }
    whole.sum = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      Part other = *cluster_map(&s.part, r);
      if (other.sum > 0) whole.sum += other.sum * softmax_weight(other.max, whole.max, inverse);
    }
    store_record(p.rows_out, row, Record{whole.max, whole.sum, whole.id, whole.drafted, whole.bad, 0, NO_ID});
  }
  cluster_sync();  // the others' shared memory must outlive the reading
}

// ---- a request --------------------------------------------------------------------------------------------------

// A request in the lanes of a warp: lane i holds row i and draft i, as far as there are such.
struct Judge {
  int slot, drafts, start, rule;
  float inverse;
  u64 seed;
  bool greedy, bad;  // bad: a row of the request
  Record row;
  Target target;
  i32 draft;             // its token
  float q_max, q_norm;   // its distribution
  float p_draft, q_draft;
  double weight;         // w_i of block verification
};

DEVICE Judge read_request(const Accept& p, int place, int slot) {
  int lane = lane_id();
  Judge j;
  j.slot = slot;
  j.drafts = min(load_l2(p.num_drafts + slot), p.rows_per_request - 1);
  j.start = load_l2(p.position + slot) + 1;
  j.rule = load_l2(p.rule + slot);
  j.seed = load_l2(p.seed + slot);
  float temperature = load_l2(p.temperature + slot);
  j.greedy = !(temperature > 0);
  j.inverse = inverse_of(temperature);
  // Lanes beyond the drafts load something that nobody looks at, rather than wait for the number of drafts.
  int first = place * p.rows_per_request, last = p.rows_per_request - 1;
  i32 draft = load_l2(p.row_token + first + min(lane + 1, last));
  uint4 stats = load_l2((const uint4*)(p.draft_stats + (slot * BLOCK + min(lane, BLOCK - 1)) * 4));
  j.row = read_row(p.rows, p.num_rows, p.first_token / VOCAB, first + min(lane, last), j.inverse);
  bool has_row = lane <= j.drafts, has_draft = lane < j.drafts;
  j.bad = ballot(has_row && j.row.bad);
  j.target = Target{j.row.max, j.inverse, 1.0f / j.row.sum, load_l2(p.min_p + slot), j.row.key, j.row.last};
  j.draft = has_draft ? draft : -1;
  j.p_draft = j.q_draft = j.q_max = j.q_norm = 0;
  if (has_draft && !j.greedy) {
    j.q_max = as_float(stats.x);
    j.q_norm = 1.0f / as_float(stats.y);
    j.p_draft = softmax_weight(j.row.drafted, j.row.max, j.inverse) * j.target.norm;
    j.q_draft = softmax_weight(as_float(stats.z), j.q_max, j.inverse) * j.q_norm;
  }
  double weight = 1;
  j.weight = 1;
#pragma unroll
  for (int i = 0; i < BLOCK; i++) {
    double pd = (double)shuffle(j.p_draft, i), qd = (double)shuffle(j.q_draft, i);
    if (i < j.drafts) {
      weight = weight * pd;
      weight = weight < qd ? weight / qd : pd > 0 ? 1.0 : 0.0;  // the quotient capped at 1, whatever it overflows to
    }
    if (lane == i + 1) j.weight = weight;
  }
  return j;
}

// Rows 1..drafts - 1 of block verification: the sum of max(w p - q, 0) over the shard. A cluster per row.
KERNEL(excess, Accept, THREADS, 2) {
  struct Shared {
    Target target;
    float q_max, q_norm, weight;
    float sums[WARPS];
    float sum;
  };
  static_assert(sizeof(Shared) <= SMALL_SHARED, "cuda.py reserves too little");
  Shared& s = *(Shared*)shared_memory();
  launch_dependents();
  wait_for_dependencies();
  int index = blockIdx.x / CLUSTER, place = index / (BLOCK - 1), i = 1 + index % (BLOCK - 1);
  int slot = load_l2(p.row_slot + place * p.rows_per_request);
  if (slot < 0 || load_l2(p.rule + slot) != BLOCK_RULE || !(load_l2(p.temperature + slot) > 0) ||
      i >= min(load_l2(p.num_drafts + slot), p.rows_per_request - 1))
    return;  // with the whole cluster
  if (warp_id() == 0) {
    Judge j = read_request(p, place, slot);
    if (lane_id() == i) s.target = j.target, s.q_max = j.q_max, s.q_norm = j.q_norm, s.weight = (float)j.weight;
  }
  sync_block();
  Target target = s.target;
  float q_max = s.q_max, q_norm = s.q_norm, scale = s.weight * target.norm;
  int begin = cluster_rank() * CHUNK, size = size_of(begin, CHUNK);
  const float* logits = p.logits + ((i64)place * p.rows_per_request + i) * VOCAB + begin;
  const float* drafted = p.draft_logits + ((i64)slot * BLOCK + i) * VOCAB + begin;
  float sum = 0;
  for (int at = 4 * threadIdx.x; at < size; at += 4 * THREADS) {
    uint4 a = load_l2((const uint4*)(logits + at)), b = load_l2((const uint4*)(drafted + at));
    u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float weight = target_weight(target, as_float(x[k]), p.first_token + begin + at + k) * scale;
      sum += fmaxf(weight - softmax_weight(as_float(y[k]), q_max, target.inverse) * q_norm, 0.0f);
    }
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) s.sums[warp_id()] = sum;
  sync_block();
  if (threadIdx.x == 0) {
    float total = 0;
    for (int w = 0; w < WARPS; w++) total += s.sums[w];
    s.sum = total;
  }
  cluster_sync();
  if (cluster_rank() == 0 && threadIdx.x == 0) {
    float total = 0;
    for (int r = 0; r < CLUSTER; r++) total += *cluster_map(&s.sum, r);
    for (int peer = 0; peer < WORLD; peer++) p.excess_out[peer][place * BLOCK + i] = total;
  }
  cluster_sync();
}

// How many drafts stand, in all lanes.
DEVICE int accepted_of(const Accept& p, const Judge& j, int place) {
  int lane = lane_id();
  bool has_draft = lane < j.drafts;
  u32 word = random_words(j.seed, j.start, j.start + lane, ACCEPT, 0).x;
  if (j.rule == SYNTHETIC || j.greedy || j.rule == STANDARD) {
    bool stands = j.rule == SYNTHETIC ? has_draft && (i64)word < load_l2(p.synthetic_words + j.slot * BLOCK + lane)
                  : j.greedy          ? j.row.id == j.draft
                                      : uniform(word) * (double)j.q_draft < (double)j.p_draft;
    return lowest_bit(~ballot(has_draft && stands));
  }
  // Row i passes by the number of draft i - 1.
  u32 mine = shuffle_up(word, 1);
  double sum = j.weight;  // behind the last draft nothing competes with p
  if (lane >= 1 && lane < j.drafts) {
    sum = 0;
    for (int r = 0; r < WORLD; r++) sum += (double)load_l2(p.excess + (r * p.num_places + place) * BLOCK + lane);
  }
  double total = sum + (1 - j.weight);
  bool passes = uniform(mine) < (total > 0 ? sum / total : 1.0);
  u32 passed = ballot(passes && lane >= 1 && lane <= j.drafts);
  return passed ? 31 - leading_zeros(passed) : 0;
}

// RACE_BLOCKS blocks a request: each decides, the first writes it down, and all race for the new token.
KERNEL(race, Accept, THREADS, 4) {
  struct Shared {
    Target target;
    float q_max, q_norm, weight;
    int accepted, start, purpose;
    u64 seed;
    bool bad;
    float scores[2][WARPS];
    i32 ids[2][WARPS];
  };
  static_assert(sizeof(Shared) <= SMALL_SHARED, "cuda.py reserves too little");
  Shared& s = *(Shared*)shared_memory();
  launch_dependents();
  wait_for_dependencies();
  int place = blockIdx.x / RACE_BLOCKS, part = blockIdx.x % RACE_BLOCKS;
  int slot = load_l2(p.row_slot + place * p.rows_per_request);
  if (slot < 0) return;
  bool greedy = !(load_l2(p.temperature + slot) > 0);
  if (greedy && part) return;
  if (warp_id() == 0) {
    Judge j = read_request(p, place, slot);
    int accepted = accepted_of(p, j, place);
    bool bonus = accepted == j.drafts;
    if (lane_id() == accepted) {
      s.target = j.target, s.accepted = accepted, s.start = j.start, s.seed = j.seed, s.bad = j.bad;
      s.q_max = j.q_max, s.q_norm = bonus || j.rule == SYNTHETIC ? 0.0f : j.q_norm;
      s.weight = j.rule == BLOCK_RULE && !bonus ? (float)j.weight : 1.0f;
      s.purpose = bonus || j.rule == SYNTHETIC ? BONUS : RESIDUAL;
      u32 token = greedy ? (u32)j.row.id : ~0u;
      if (part == 0) *(uint4*)(p.decisions + place * 4) = make_uint4((u32)accepted, token, j.bad, (u32)j.drafts);
    }
  }
  sync_block();
  if (greedy || s.bad) return;

  Target target = s.target;
  float q_max = s.q_max, q_norm = s.q_norm, weight = s.weight;
  bool residual = q_norm > 0;
  int begin = part * RACE_CHUNK, size = size_of(begin, RACE_CHUNK);
  const float* logits = p.logits + ((i64)place * p.rows_per_request + s.accepted) * VOCAB + begin;
  const float* drafted = p.draft_logits + ((i64)slot * BLOCK + (residual ? s.accepted : 0)) * VOCAB + begin;
  float best = 0, best_of_p = 0;  // a score of 0 is a token of weight 0
  i32 id = NO_ID, id_of_p = NO_ID;
  for (int at = 4 * threadIdx.x; at < size; at += 4 * THREADS) {
    i32 first = p.first_token + begin + at;
    uint4 a = load_l2((const uint4*)(logits + at)), b = a;
    if (residual) b = load_l2((const uint4*)(drafted + at));
    u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    uint4 words = random_words(s.seed, s.start, s.start + s.accepted, s.purpose, (u32)first / 4);
    u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float of_p = target_weight(target, as_float(x[k]), first + k) * target.norm;
      if (of_p == 0) continue;
      float rest = residual ? weight * of_p - softmax_weight(as_float(y[k]), q_max, target.inverse) * q_norm : of_p;
      // 2^64: the smallest weight still has a positive score, the largest a finite one.
      float race = 0x1p64f / exponential(word[k]);
      if (beats(of_p * race, first + k, best_of_p, id_of_p)) best_of_p = of_p * race, id_of_p = first + k;
      if (rest > 0 && beats(rest * race, first + k, best, id)) best = rest * race, id = first + k;
    }
  }
  warp_best(best, id);
  warp_best(best_of_p, id_of_p);
  if (lane_id() == 0) {
    s.scores[0][warp_id()] = best, s.ids[0][warp_id()] = id;
    s.scores[1][warp_id()] = best_of_p, s.ids[1][warp_id()] = id_of_p;
  }
  sync_block();
  if (threadIdx.x) return;
  for (int w = 1; w < WARPS; w++) {
    if (beats(s.scores[0][w], s.ids[0][w], best, id)) best = s.scores[0][w], id = s.ids[0][w];
    if (beats(s.scores[1][w], s.ids[1][w], best_of_p, id_of_p)) best_of_p = s.scores[1][w], id_of_p = s.ids[1][w];
  }
  for (int peer = 0; peer < WORLD; peer++)
    *(uint4*)(p.races_out[peer] + (place * RACE_BLOCKS + part) * 4) =
        make_uint4(as_bits(best), (u32)id, as_bits(best_of_p), (u32)id_of_p);
}
