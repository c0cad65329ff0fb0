// Top-k, top-p and min-p of rows over shards of the vocabulary, exactly: `narrow` for some levels, then `cut`.
//
// Top-k and top-p each keep a prefix of the ranking by (falling logit, rising id). Where it ends is searched for in all
// shards at once: a level counts, and weighs, the tokens between two keys in BINS bins and sends the histogram to every
// rank; the next one adds the ranks' histograms up and goes on in the bin where the limit is reached. All ranks read
// the same integers, so all choose alike, and alike for any number of ranks.
//
// Level 0 divides by distance from the maximum, 1/8 of a logit a bin: logits spread over many bins there, where the
// leading bits of a float would send most of a row to a few, one atomic after the other. The levels behind it divide an
// interval of keys: of 32 bits at most, then of 24, 16, 8, and then it is one key: five levels in all. Top-p is of the
// mass that top-k leaves; while that is known between two bounds only, top-p's interval covers what either bound would
// choose. Hence rows that ask for both may take eight levels, where logits are of few values. Most are done after three,
// and a launch for rows that are done only looks. Min-p needs none but what level 0 notes down.
//
// Compiled with VOCAB, WORLD, CLUSTER, FILTER_SHARED (bytes).
#include "accept/rows.cuh"

constexpr int BINS = 256;
constexpr int BY_COUNT = 0, BY_MASS = 1, SEARCHES = 2;  // top-k, top-p
constexpr u32 OFF = 0, OPEN = 1, FOUND = 2;
constexpr u32 FIRST_KEY = 0x00800000u, LAST_KEY = 0xFF7FFFFFu;  // of the finite floats
static_assert(BINS == THREADS, "a thread per bin");
constexpr int BLOCK_BINS = BINS / CLUSTER;  // that a block adds up for its cluster
static_assert(BINS % CLUSTER == 0 && SEARCHES * BLOCK_BINS <= THREADS, "a thread per search and bin");

// Masses are integers, so that their sums do not depend on the order: 2^36 for the most likely token, in two halves that
// a block adds up without a carry, none above 2^18.
constexpr int HALF = 18;
static_assert(CHUNK < 1 << (32 - HALF), "the sums of a block fit 32 bits");

// Where what a filter keeps ends. All ranks know the same, except for `below`.
struct Search {
  u32 state;
  u32 low, high;          // the keys between which it ends,
  u32 count;              // which so many tokens have
  u32 kept;               // FOUND: so many of them stay, those of the lowest ids; all of them, or low = high
  u32 below;              // of `count`, those of lower ranks
  u32 count_before;       // tokens above
  u32 unused;
  u64 mass_before, mass;  // of the tokens above, and between
  u64 limit;              // of mass, once it is known
};

// What launches hand on of a row. Level 0 writes it for every row; where nothing is filtered, both searches are OFF.
struct Progress {
  Search searches[SEARCHES];
  float max, inverse, top_p, min_p;
  i32 id, top_k;  // id: of the maximum
};
constexpr int WORDS = sizeof(Progress) / 4;
static_assert(WORDS == 34, "cuda.py allocates it");

struct Bin {  // of a histogram, with all that stands before it and up to its end
  u32 index, count_before, count_to, below;
  u64 mass_before, mass_to;
};

struct Shared {
  u32 count[SEARCHES][BINS], low[SEARCHES][BINS], high[SEARCHES][BINS];
  Progress row;
  Bin first, last;
  u64 warp_mass[WARPS];
  u32 warp_count[WARPS];
  float scratch[WARPS];
  u32 low_key, high_key, ties;
  i32 last_id;
  float sum;
};
static_assert(sizeof(Shared) <= FILTER_SHARED, "cuda.py reserves too little");

DEVICE int coarse_bin(float logit, float max) { return (int)fminf((max - logit) * 8.0f, (float)(BINS - 1)); }

// By how much a bin's keys are shifted: the interval in at most BINS bins, in as many as a power of two allows.
DEVICE u32 shift_of(const Search& s) { return (u32)max(0, 24 - leading_zeros(s.high - s.low)); }

// The least key whose coarse bin is at most `bin`. By a warp.
DEVICE u32 least_key(int bin, float max) {
  u32 low = FIRST_KEY, high = order_key(max);
  while (low < high) {
    u64 step = (high - low) / 32 + 1;
    u32 key = (u32)min((u64)high, low + step * (u64)lane_id());
    int first = lowest_bit(ballot(coarse_bin(float_of_key(key), max) <= bin));
    u32 at = shuffle(key, first & 31), before = shuffle(key, (first - 1) & 31);
    if (first >= 0) high = at;
    if (first) low = before + 1;
  }
  return low;
}

// The mass at which a share of the whole is reached, at least 1.
DEVICE u64 share_of(float share, u64 whole) {
  double exact = (double)share * (double)whole;
  u64 limit = (u64)exact;
  if ((double)limit < exact) limit++;
  return max((u64)1, min(limit, whole));
}

// Takes in the histograms of level `level` for one search: its interval becomes the bins in which the running count (or
// mass) reaches `least` to `most`. `least` 0: both are top-p of all mass. By the whole block.
DEVICE void narrow_to(Shared& s, const Filter& p, int row, int level, int which, u64 least, u64 most) {
  int bin = threadIdx.x, warp = warp_id(), lane = lane_id(), own_rank = p.first_token / VOCAB;
  Search search = s.row.searches[which];
  const uint4* histograms = (const uint4*)p.histograms;
  u32 count = 0, below = 0;
  u64 mass = 0;
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    i64 at = ((i64)(r * 2 + (level & 1)) * p.num_rows + row) * SEARCHES + (level ? which : 0);
    uint4 h = load_l2(histograms + at * BINS + bin);
    count += h.x;
    if (r < own_rank) below += h.x;
    mass += (u64)h.z << 32 | h.y;
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
  u64 whole = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) count_to += s.warp_count[w], mass_to += s.warp_mass[w];
    whole += s.warp_mass[w];
  }
  if (least == 0) least = most = share_of(s.row.top_p, whole);
  count_to += search.count_before, mass_to += search.mass_before;
  u64 to = which == BY_MASS ? mass_to : count_to, own = which == BY_MASS ? mass : count;
  Bin here = {(u32)bin, count_to - count, count_to, below, mass_to - mass, mass_to};
  if (to >= least && to - own < least) s.first = here;
  if (to >= most && to - own < most) s.last = here;
  sync_block();
  Bin first = s.first, last = s.last;
  if (level == 0) {
    if (warp == 0) s.low_key = least_key((int)last.index, s.row.max);
    if (warp == 1) s.high_key = first.index ? least_key((int)first.index - 1, s.row.max) - 1 : order_key(s.row.max);
  } else if (threadIdx.x == 0) {
    u32 shift = shift_of(search);
    u64 end = (u64)(last.index + 1) << shift;
    s.high_key = search.high - (first.index << shift);
    s.low_key = end > search.high - search.low ? search.low : search.high - (u32)end + 1;
  }
  sync_block();
  if (threadIdx.x == 0) {
    search.low = s.low_key, search.high = s.high_key;
    search.count_before = first.count_before, search.count = last.count_to - first.count_before;
    search.mass_before = first.mass_before, search.mass = last.mass_to - first.mass_before;
    search.below = first.below;  // of one bin, as it is when the search ends
    if (least == most) search.limit = least;
    s.row.searches[which] = search;
  }
  sync_block();
}

// Takes in the histograms of level `level` for the searches that are open. By the whole block.
DEVICE void advance(Shared& s, const Filter& p, int row, int level) {
  Search &k = s.row.searches[BY_COUNT], &m = s.row.searches[BY_MASS];
  if (k.state == OPEN) {
    u64 limit = (u64)s.row.top_k;
    narrow_to(s, p, row, level, BY_COUNT, limit, limit);
    if (threadIdx.x == 0) {
      k.kept = (u32)limit - k.count_before;
      if (k.kept == k.count || k.low == k.high) k.state = FOUND;
    }
    sync_block();
  }
  if (m.state == OPEN) {
    u64 least = m.limit, most = least;
    if (least == 0 && k.state == OPEN) {
      least = share_of(s.row.top_p, k.mass_before), most = share_of(s.row.top_p, k.mass_before + k.mass);
    } else if (least == 0 && k.state == FOUND) {
      u64 mass = k.kept == k.count ? k.mass : k.mass / k.count * k.kept;
      least = most = share_of(s.row.top_p, k.mass_before + mass);
    }
    narrow_to(s, p, row, level, BY_MASS, least, most);
    if (threadIdx.x == 0 && m.limit && (m.count == 1 || m.low == m.high)) {
      u64 each = m.mass / m.count;
      m.kept = (u32)((m.limit - m.mass_before + each - 1) / each);
      m.state = FOUND;
    }
    sync_block();
  }
}

// What level 0 starts from. By every block of the cluster.
DEVICE void start(Shared& s, const Filter& p, int row) {
  int slot = load_l2(p.row_slot + row);
  Record whole = read_row(p.rows, p.num_rows, 0, row, 0);
  if (threadIdx.x == 0) {
    Progress& to = s.row;
    to.searches[BY_COUNT] = to.searches[BY_MASS] = Search{OFF, FIRST_KEY, LAST_KEY, 0, 0, 0, 0, 0, 0, 0, 0};
    float temperature = slot < 0 ? 0.0f : load_l2(p.temperature + slot);
    if (temperature > 0 && !whole.bad) {
      to.max = whole.max, to.id = whole.id, to.inverse = inverse_of(temperature);
      to.top_k = load_l2(p.top_k + slot), to.top_p = load_l2(p.top_p + slot), to.min_p = load_l2(p.min_p + slot);
      bool ranks = to.top_k > 0 && to.top_k < VOCAB * WORLD, cuts = to.top_p < 1;
      if (ranks) to.searches[BY_COUNT].state = OPEN;
      if (cuts) to.searches[BY_MASS].state = OPEN;
      // Nothing to search for: a search that ended with the last key, behind which min-p may still drop tokens.
      if (!ranks && !cuts && to.min_p > 0) to.searches[BY_COUNT].state = FOUND, to.searches[BY_COUNT].low = 0;
    }
  }
  sync_block();
}

// What the launches before found, with the histograms of the last one taken in; in all blocks of the cluster. False:
// nothing is left to do for the row.
DEVICE bool resume(Shared& s, const Filter& p, int row, bool to_cut) {
  u32* words = (u32*)&s.row;
  if (threadIdx.x < WORDS) words[threadIdx.x] = load_l2(p.progress + row * WORDS + threadIdx.x);
  sync_block();
  u32 by_count = s.row.searches[BY_COUNT].state, by_mass = s.row.searches[BY_MASS].state;
  bool open = by_count == OPEN || by_mass == OPEN;
  if (!open) return to_cut && (by_count != OFF || by_mass != OFF);
  if (cluster_rank() == 0) advance(s, p, row, p.level - 1);
  cluster_sync();
  if (cluster_rank() && threadIdx.x < WORDS) words[threadIdx.x] = *cluster_map(words + threadIdx.x, 0);
  sync_block();
  return true;
}

// A cluster per row.
KERNEL(narrow, Filter, THREADS, 4) {
  Shared& s = *(Shared*)shared_memory();
  launch_dependents();
  wait_for_dependencies();
  int row = blockIdx.x / CLUSTER, rank = cluster_rank();
  if (p.level == 0) start(s, p, row);
  else if (!resume(s, p, row, false)) return;  // with the whole cluster

  float max = s.row.max, inverse = s.row.inverse;
  bool weighs = s.row.searches[BY_MASS].state != OFF, open[SEARCHES];
  u32 low[SEARCHES], extent[SEARCHES], high[SEARCHES], shift[SEARCHES];
#pragma unroll
  for (int which = 0; which < SEARCHES; which++) {
    const Search& search = s.row.searches[which];
    open[which] = search.state == OPEN;
    low[which] = search.low, high[which] = search.high, extent[which] = search.high - search.low;
    shift[which] = shift_of(search);
    s.count[which][threadIdx.x] = s.low[which][threadIdx.x] = s.high[which][threadIdx.x] = 0;
  }
  if (rank == 0 && threadIdx.x < WORDS) p.progress[row * WORDS + threadIdx.x] = ((u32*)&s.row)[threadIdx.x];
  if (!open[BY_COUNT] && !open[BY_MASS]) {
    if (p.level) cluster_sync();  // the others have to read how it ended
    return;
  }
  sync_block();
  auto add = [&](int which, int bin, float x) {
    add_atomic(&s.count[which][bin], 1);
    if (!weighs) return;
    float mass = softmax_weight(x, max, inverse) * (float)(1 << HALF);
    u32 whole = (u32)mass;
    u32 part = (u32)((mass - (float)whole) * (float)(1 << HALF) + 0.5f);  // rounded: a long tail must not be lost
    if (part) add_atomic(&s.low[which][bin], part);
    if (whole) add_atomic(&s.high[which][bin], whole);
  };
  int begin = rank * CHUNK, size = size_of(begin, CHUNK);
  const float* logits = p.logits + (i64)row * VOCAB + begin;
#pragma unroll 4
  for (int at = 4 * threadIdx.x; at < size; at += 4 * THREADS) {
    uint4 bits = load_l2((const uint4*)(logits + at));
    float x[4] = {as_float(bits.x), as_float(bits.y), as_float(bits.z), as_float(bits.w)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (p.level == 0) {
        add(0, coarse_bin(x[j], max), x[j]);
        continue;
      }
      u32 key = order_key(x[j]);
#pragma unroll
      for (int which = 0; which < SEARCHES; which++)
        if (open[which] && key - low[which] <= extent[which]) add(which, (int)(high[which] - key >> shift[which]), x[j]);
    }
  }
  cluster_sync();
  int which = threadIdx.x / BLOCK_BINS, bin = rank * BLOCK_BINS + threadIdx.x % BLOCK_BINS;
  if (p.level ? which < SEARCHES && s.row.searches[which % SEARCHES].state == OPEN : which == 0) {
    u32 count = 0;
    u64 mass = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      count += *cluster_map(&s.count[which][bin], r);
      mass += ((u64)*cluster_map(&s.high[which][bin], r) << HALF) + *cluster_map(&s.low[which][bin], r);
    }
    i64 at = (((i64)(p.level & 1) * p.num_rows + row) * SEARCHES + which) * BINS + bin;
#pragma unroll
    for (int peer = 0; peer < WORLD; peer++)
      ((uint4*)p.histograms_out[peer])[at] = make_uint4(count, (u32)mass, (u32)(mass >> 32), 0);
  }
  cluster_sync();  // the others' shared memory must outlive the reading
}

// The id of the token with which the lowest `wanted` of those with `key` in this shard end: NO_ID where all of them
// stay, -1 where none does. By the whole cluster.
DEVICE i32 last_of(Shared& s, const float* logits, int size, i32 first_id, u32 key, int wanted) {
  constexpr int PIECE = (CHUNK / 4 + THREADS - 1) / THREADS * 4;  // consecutive tokens of a thread
  int begin = min((int)threadIdx.x * PIECE, size), end = min(begin + PIECE, size);
  u32 own = 0;
  for (int at = begin; at < end; at++) own += order_key(load_l2(logits + at)) == key;
  u32 to = own;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    u32 c = shuffle_up(to, d);
    if (lane_id() >= d) to += c;
  }
  if (lane_id() == 31) s.warp_count[warp_id()] = to;
  sync_block();
  u32 ties = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w == warp_id()) to += ties;
    ties += s.warp_count[w];
  }
  if (threadIdx.x == 0) s.ties = ties, s.last_id = NO_ID;
  cluster_sync();
  int left = wanted;  // behind the blocks before this one
  for (int r = 0; r < cluster_rank(); r++) left -= (int)*cluster_map(&s.ties, r);
  if (left > (int)(to - own) && left <= (int)to) {
    int at = begin;
    for (left -= (int)(to - own); order_key(load_l2(logits + at)) != key || --left; at++) {}
    for (int r = 0; r < CLUSTER; r++) *cluster_map(&s.last_id, r) = first_id + at;
  }
  cluster_sync();
  return wanted > 0 ? s.last_id : -1;
}

// What is kept of each row goes into its record.
KERNEL(cut, Filter, THREADS, 4) {
  Shared& s = *(Shared*)shared_memory();
  launch_dependents();
  wait_for_dependencies();
  int row = blockIdx.x / CLUSTER, rank = cluster_rank(), i = row % p.rows_per_request;
  if (!resume(s, p, row, true)) return;
  int begin = rank * CHUNK, size = size_of(begin, CHUNK);
  i32 first_id = p.first_token + begin;
  const float* logits = p.logits + (i64)row * VOCAB + begin;
  const Search &k = s.row.searches[BY_COUNT], &m = s.row.searches[BY_MASS];
  const Search& found = m.state == OFF ? k : m;  // top-p ends no later
  Target target = {s.row.max, s.row.inverse, 1, s.row.min_p, found.low, NO_ID};
  if (found.kept < found.count)
    target.last = last_of(s, logits, size, first_id, found.low, (int)found.kept - (int)found.below);
  float sum = 0;
  for (int at = 4 * threadIdx.x; at < size; at += 4 * THREADS) {
    uint4 bits = load_l2((const uint4*)(logits + at));
    u32 x[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 4; j++) sum += target_weight(target, as_float(x[j]), first_id + at + j);
  }
  sum = block_sum(s.scratch, sum);
  if (threadIdx.x == 0) s.sum = sum;
  cluster_sync();
  if (rank == 0 && threadIdx.x == 0) {
    sum = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) sum += *cluster_map(&s.sum, r);
    Record own = load_record(p.rows, p.num_rows, p.first_token / VOCAB, row);
    i32 draft = i + 1 < p.rows_per_request ? load_l2(p.row_token + row + 1) : -1;
    if (!(target_weight(target, own.drafted, draft) > 0)) own.drafted = negative_infinity();
    // All shards' sums are relative to the row's maximum from now on.
    store_record(p.rows_out, row, Record{s.row.max, sum, s.row.id, own.drafted, 0, target.key, target.last});
  }
  cluster_sync();
}
