// Acceptance of drafts over a shard of the vocabulary: `weigh` (every row), `excess` (block verification alone) and
// `race` (the row that decides the new token). `slots.cu` commits what they find.
//
// Vocabulary shards meet only in small records that each rank writes into a slab of every peer's mailbox:
// - row records [WORLD][rows][8 words] of `weigh`: what all of p needs (`Row`),
// - excess [WORLD][places][BLOCK] of `excess`: the sum over the vocabulary that block verification needs,
// - races [WORLD][places][RACE_BLOCKS][4 words] of `race`: the best of the residual, and the best of p.
// Readers merge the slabs in order, so all ranks decide alike. Filters would exchange their histograms as well
// (`choose` merges those of the cluster): a top-k or top-p row is exact for WORLD = 1 only.
//
// What a request does not ask for it does not pay: greedy rows cost an argmax, rows without filters no selection.
//
// Compiled with VOCAB (of the shard, a multiple of 16), BLOCK (drafts a request may bring), WORLD, CLUSTER (blocks of a
// row), RACE_BLOCKS, WEIGH_SHARED and SMALL_SHARED (bytes).
#include "accept/sampling.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROW_WORDS = 8;
constexpr int STANDARD = 0, BLOCK_RULE = 1, SYNTHETIC = 2;  // cuda.RULE_CODES
constexpr int BINS = 256, LEVELS = 5;
static_assert(BINS == THREADS, "a thread per bin");
static_assert(VOCAB % 16 == 0, "16-byte loads, and a random block of four tokens is never split");
static_assert(BLOCK < 32 && CLUSTER <= 32 && RACE_BLOCKS == 32, "lanes hold rows, parts and races");

constexpr int part_of(int parts) { return (VOCAB / 4 + parts - 1) / parts * 4; }
constexpr int CHUNK = part_of(CLUSTER), RACE_CHUNK = part_of(RACE_BLOCKS);
DEVICE int size_of(int begin, int chunk) { return max(0, min(chunk, VOCAB - begin)); }

// ---- a row over the vocabulary ----------------------------------------------------------------------------------

struct Part {  // of a row: what one block of the cluster saw
  float max, sum, drafted, kept;
  i32 id;
  u32 bad;
};

struct Bin {  // of a histogram over the ranking, with what stands before it
  i32 index;
  u32 count, count_before;
  u64 mass, mass_before;
};

struct WeighShared {
  float logits[CHUNK];
  // Masses are integers (2^40 for the most likely token), so that their sums do not depend on the order; in two
  // halves, for want of 64-bit atomics.
  u32 count[2][BINS], low[2][BINS], high[2][BINS];
  u64 warp_mass[WARPS];
  u32 warp_count[WARPS];
  float warp_value[WARPS];
  i32 warp_id[WARPS];
  u32 warp_bad[WARPS];
  Part part;
  Bin chosen;
  i32 last;
};
static_assert(sizeof(WeighShared) <= WEIGH_SHARED, "cuda.py reserves too little");

DEVICE float block_sum(WeighShared& s, float value) {
  value = warp_sum(value);
  sync_block();
  if (lane_id() == 0) s.warp_value[warp_id()] = value;
  sync_block();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += s.warp_value[w];
  return sum;
}

DEVICE u64 mass_of(float logit, float max, float inverse) {
  return (u64)(softmax_weight(logit, max, inverse) * 0x1p40f);
}

// The first level cuts the ranking by distance from the maximum, 1/8 a bin: logits spread over many bins, where the
// leading bits of a float would send most of a row to a few, one atomic after the other. It is monotonic, so the four
// bytes of the key refine it.
DEVICE int coarse_bin(float logit, float max) { return (int)fminf((max - logit) * 8.0f, (float)(BINS - 1)); }

// The mass at which a share of the whole is reached, at least 1.
DEVICE u64 share_of(float share, u64 whole) {
  double exact = (double)share * (double)whole;
  u64 limit = (u64)exact;
  if ((double)limit < exact) limit++;
  return max((u64)1, min(limit, whole));
}

// Merges the cluster's histograms and finds the bin in which the running count (or mass) reaches `limit`; bins rise
// along the ranking. `limit` 0 becomes `share` of all mass. `outer`: the bin that these ones divide.
DEVICE Bin choose(WeighShared& s, int buffer, const Bin& outer, bool by_mass, float share, u64& limit) {
  int bin = threadIdx.x, warp = warp_id(), lane = lane_id();
  u32 count = 0;
  u64 mass = 0;
#pragma unroll
  for (int r = 0; r < CLUSTER; r++) {
    count += *cluster_map(&s.count[buffer][bin], r);
    mass += ((u64)*cluster_map(&s.high[buffer][bin], r) << 32) + *cluster_map(&s.low[buffer][bin], r);
  }
  u32 count_to = count;
  u64 mass_to = mass;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    u32 c = shuffle_up(count_to, d);
    u64 m = shuffle_up(mass_to, d);
    if (lane >= d) count_to += c, mass_to += m;
  }
  if (lane == 31) s.warp_count[warp] = count_to, s.warp_mass[warp] = mass_to;
  sync_block();
  u32 total_count = outer.count_before;
  u64 total_mass = outer.mass_before;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w == warp) count_to += total_count, mass_to += total_mass;
    total_count += s.warp_count[w];
    total_mass += s.warp_mass[w];
  }
  if (limit == 0) limit = share_of(share, total_mass);
  u64 to = by_mass ? mass_to : count_to, own = by_mass ? mass : count;
  if (to >= limit && to - own < limit) s.chosen = Bin{bin, count, count_to - count, mass, mass_to - mass};
  sync_block();
  return s.chosen;
}

struct Cut {
  u32 key;
  i32 last;
  u64 mass;  // of all that is kept
};

// Where the ranking of the row ends: with the token that brings the count to `limit`, or (limit 0) the mass to `share`
// of `whole` (0: of all). All threads of the cluster call it; the logits are in shared memory.
DEVICE Cut select(WeighShared& s, int size, i32 first_id, float best, float inverse, u64 limit, float share,
                  u64 whole) {
  bool by_mass = limit == 0;
  if (by_mass && whole) limit = share_of(share, whole);
  for (int b = 0; b < 2; b++) s.count[b][threadIdx.x] = s.low[b][threadIdx.x] = s.high[b][threadIdx.x] = 0;
  sync_block();
  Bin found = {0, 0, 0, 0, 0};
  int coarse = 0;
  u32 key = 0;
  for (int level = 0; level < LEVELS; level++) {
    int buffer = level & 1, shift = 32 - 8 * level;
    for (int i = threadIdx.x; i < size; i += THREADS) {
      float x = s.logits[i];
      u32 k = order_key(x);
      int bin = coarse_bin(x, best);
      if (level > 0) {
        if (bin != coarse || (level > 1 && k >> (shift + 8) != key)) continue;
        bin = BINS - 1 - (int)(k >> shift & (BINS - 1));
      }
      u64 mass = mass_of(x, best, inverse);
      add_atomic(&s.count[buffer][bin], 1);
      u32 low = (u32)mass, high = (u32)(mass >> 32);
      if (low) high += add_atomic(&s.low[buffer][bin], low) + low < low;  // the carry
      if (high) add_atomic(&s.high[buffer][bin], high);
    }
    cluster_sync();
    // The level before was read by the whole cluster ahead of this barrier, so its histogram is free.
    s.count[buffer ^ 1][threadIdx.x] = s.low[buffer ^ 1][threadIdx.x] = s.high[buffer ^ 1][threadIdx.x] = 0;
    found = choose(s, buffer, found, by_mass, share, limit);
    if (level == 0) coarse = found.index;
    else key = key << 8 | (u32)(BINS - 1 - found.index);
  }
  // What is left are the tokens of one logit, of equal mass; the lowest ids of them are kept.
  u64 each = found.mass / found.count;
  u32 wanted = by_mass ? (u32)((limit - found.mass_before + each - 1) / each) : (u32)(limit - found.count_before);
  i32 last = NO_ID;
  if (wanted < found.count) {
    constexpr int BUFFER = (LEVELS - 1) & 1;
    u32 before = 0;
    for (int r = 0; r < cluster_rank(); r++) before += *cluster_map(&s.count[BUFFER][found.index], r);
    u32 left = wanted - before;
    if (warp_id() == 0 && before < wanted && left <= s.count[BUFFER][found.index]) {
      int at = 0;
      for (int base = 0; base < size; base += 32) {
        int i = base + lane_id();
        u32 ties = ballot(i < size && order_key(s.logits[i]) == key);
        u32 n = (u32)count_bits(ties);
        if (left <= n) {
          for (; left > 1; left--) ties &= ties - 1;
          at = base + lowest_bit(ties);
          break;
        }
        left -= n;
      }
      if (lane_id() < CLUSTER) *cluster_map(&s.last, lane_id()) = first_id + at;
    }
    cluster_sync();
    last = s.last;
  }
  cluster_sync();  // nobody reads these histograms any more
  return Cut{key, last, found.mass_before + wanted * each};
}

DEVICE void store_row(u32* const (&out)[8], int row, const Part& part, u32 key, i32 last) {
#pragma unroll
  for (int peer = 0; peer < WORLD; peer++) {
    uint4* at = (uint4*)(out[peer] + (i64)row * ROW_WORDS);
    at[0] = make_uint4(as_bits(part.max), as_bits(part.sum), (u32)part.id, as_bits(part.drafted));
    at[1] = make_uint4(part.bad, key, (u32)last, as_bits(part.kept));
  }
}

// A cluster per row: maximum and its token, sum of exponentials, the draft's logit, what filters keep.
KERNEL(weigh, Accept, THREADS, 2) {
  WeighShared& s = *(WeighShared*)shared_memory();
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

  float best = negative_infinity();
  i32 best_id = NO_ID;
  bool bad = false;
  for (int at = 4 * threadIdx.x; at < size; at += 4 * THREADS) {
    uint4 bits = load_l2((const uint4*)(logits + at));
    float x[4] = {as_float(bits.x), as_float(bits.y), as_float(bits.z), as_float(bits.w)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      s.logits[at + j] = x[j];
      bad |= !is_finite(x[j]);
      if (x[j] > best) best = x[j], best_id = first_id + at + j;
    }
  }
  if (slot < 0) return;  // with the whole cluster
  float temperature = load_l2(p.temperature + slot), top_p = load_l2(p.top_p + slot), min_p = load_l2(p.min_p + slot);
  int top_k = load_l2(p.top_k + slot);
  warp_best(best, best_id);
  bad = ballot(bad);
  if (lane_id() == 0) s.warp_value[warp_id()] = best, s.warp_id[warp_id()] = best_id, s.warp_bad[warp_id()] = bad;
  sync_block();
  for (int w = 0; w < WARPS; w++) {
    if (beats(s.warp_value[w], s.warp_id[w], best, best_id)) best = s.warp_value[w], best_id = s.warp_id[w];
    bad |= s.warp_bad[w] != 0;
  }

  float inverse = inverse_of(temperature), sum = 0;
  if (temperature > 0) {
    for (int at = threadIdx.x; at < size; at += THREADS) sum += softmax_weight(s.logits[at], best, inverse);
    sum = block_sum(s, sum);
  }
  if (threadIdx.x == 0) {
    i32 at = draft - first_id;
    bool here = draft >= 0 && at >= 0 && at < size;
    s.part = Part{best, sum, here ? s.logits[at] : negative_infinity(), sum, best_id, bad};
  }
  bool ranks = top_k > 0 && top_k < VOCAB, cuts = top_p < 1;
  bool filters = temperature > 0 && (ranks || cuts || min_p > 0);
  cluster_sync();
  if (!filters && (rank || warp_id())) {
    cluster_sync();
    return;
  }

  Part whole = *cluster_map(&s.part, 0);
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
  whole.kept = whole.sum;

  u32 key = 0;
  i32 last = NO_ID;
  if (filters && !whole.bad) {
    u64 mass = 0;
    if (ranks) {
      Cut cut = select(s, size, first_id, whole.max, inverse, (u64)top_k, 0, 0);
      key = cut.key, last = cut.last, mass = cut.mass;
    }
    if (cuts) {  // of the mass that top-k left; it ends no later
      Cut cut = select(s, size, first_id, whole.max, inverse, 0, top_p, mass);
      key = cut.key, last = cut.last;
    }
    Target target = {whole.max, inverse, 1, min_p, key, last};
    float kept = 0;
    for (int at = threadIdx.x; at < size; at += THREADS) kept += target_weight(target, s.logits[at], first_id + at);
    kept = block_sum(s, kept);
    if (threadIdx.x == 0) s.part.kept = kept;
    cluster_sync();
    whole.kept = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) whole.kept += cluster_map(&s.part, r)->kept;
  }
  if (rank == 0 && threadIdx.x == 0) store_row(p.rows_out, row, whole, key, last);
  cluster_sync();  // the others' shared memory must outlive the reading
}

// ---- a request --------------------------------------------------------------------------------------------------

struct Row {  // a verified row over all shards
  float max, kept, drafted;
  i32 id, last;
  u32 bad, key;
};

DEVICE Row read_row(const u32* records, int num_rows, int row, float inverse) {
  Row merged = {negative_infinity(), 0, negative_infinity(), NO_ID, NO_ID, 0, 0};
  float maxima[WORLD], kept[WORLD];
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    const uint4* at = (const uint4*)(records + ((i64)r * num_rows + row) * ROW_WORDS);
    uint4 a = load_l2(at), b = load_l2(at + 1);
    maxima[r] = as_float(a.x);
    kept[r] = as_float(b.w);
    if (beats(maxima[r], (i32)a.z, merged.max, merged.id)) merged.max = maxima[r], merged.id = (i32)a.z;
    merged.drafted = fmaxf(merged.drafted, as_float(a.w));
    merged.bad |= b.x;
    merged.key = b.y;
    merged.last = (i32)b.z;
  }
#pragma unroll
  for (int r = 0; r < WORLD; r++) merged.kept += kept[r] * softmax_weight(maxima[r], merged.max, inverse);
  return merged;
}

// A request in the lanes of a warp: lane i holds row i and draft i, as far as there are such.
struct Judge {
  int slot, drafts, start, rule;
  float inverse;
  u64 seed;
  bool greedy, bad;  // bad: a row of the request
  Row row;
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
  j.row = read_row(p.rows, p.num_rows, first + min(lane, last), j.inverse);
  bool has_row = lane <= j.drafts, has_draft = lane < j.drafts;
  j.bad = ballot(has_row && j.row.bad);
  j.target = Target{j.row.max, j.inverse, 1.0f / j.row.kept, load_l2(p.min_p + slot), j.row.key, j.row.last};
  j.draft = has_draft ? draft : -1;
  j.p_draft = j.q_draft = j.q_max = j.q_norm = 0;
  if (has_draft && !j.greedy) {
    j.q_max = as_float(stats.x);
    j.q_norm = 1.0f / as_float(stats.y);
    j.p_draft = target_weight(j.target, j.row.drafted, j.draft) * j.target.norm;
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
