// Exact selection of the largest keys of each row, for one wave of the plan: entries of a choice, or candidate blocks.
//
// Keys are ordered scores (score.cu); of equal ones the lowest number wins, and the result is ascending. A radix search
// of three passes finds the key at the border and how many of its equals are kept; then every warp, which owns a
// contiguous range, writes what it has of the result. Few keys are the work of one block, many of the whole cluster,
// whose blocks add their histograms. Keys stay in registers over the passes where they fit.
#include "choose.cuh"

// Constants: THREADS, KEYS (of a thread, in registers).
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr int BINS_PER_THREAD = BINS / THREADS;
constexpr int BATCH = KEYS * 32;  // keys of a warp in registers
static_assert(BINS % THREADS == 0, "");

struct Shared {
  Plan plan;
  u32 histogram[2][BINS];  // of this block's keys: of a pass, and what the next one starts with
  u32 total[BINS];         // of the cluster's
  int scan[2][32];
  i32 above, equal;     // this block's keys above the border and at it
  i32 bin, wanted;
};

// A warp's range of a row's keys.
struct Range {
  const u32* keys;
  int begin, end, batches;  // numbers; batches of BATCH keys, as many as the longest range has
  int forced;               // number that counts as above all scores; -1: none
};

DEVICE void load(u32 (&keys)[KEYS], const Range& range, int batch) {
  int first = range.begin + batch * BATCH + lane_id();
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    int number = first + i * 32;
    keys[i] = number >= range.end ? 0 : number == range.forced ? ~0u : load_l2(range.keys + number);
  }
}

// Calls f(keys, batch) for each batch of the range.
template <class F> DEVICE void for_batches(u32 (&keys)[KEYS], const Range& range, F f) {
  for (int batch = 0; batch < range.batches; batch++) {
    if (range.batches > 1) load(keys, range, batch);
    f(keys, batch);
  }
}

DEVICE void clear(u32* histogram) {
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
}

// Adds the histograms of the cluster's blocks: each block a part of the bins, for all.
DEVICE void merge(Shared& s, u32* histogram, int ranks) {
  cluster_sync();
  int share = BINS / ranks, first = cluster_rank() * share;
  for (int bin = first + threadIdx.x; bin < first + share; bin += THREADS) {
    u32 sum = 0;
    for (int rank = 0; rank < ranks; rank++) sum += *cluster_map(&histogram[bin], rank);
    for (int rank = 0; rank < ranks; rank++) *cluster_map(&s.total[bin], rank) = sum;
  }
  cluster_sync();
}

// The bin, from the top, in which the running count reaches `wanted`, and how many are wanted of that bin.
DEVICE void find_bin(Shared& s, const u32* counts, int wanted) {
  int top = BINS - 1 - (int)threadIdx.x * BINS_PER_THREAD, own = 0;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; i++) own += counts[top - i];
  int sum = scan_block<THREADS>(own, s.scan[0]), before = sum - own;
  if (before < wanted && wanted <= sum) {
    int bin = top;
    for (; before + (int)counts[bin] < wanted; bin--) before += counts[bin];
    s.bin = bin;
    s.wanted = wanted - before;
  }
  sync_block();
}

// Entry number of an eligible number of the row.
DEVICE i32 entry_of(const Select& p, int row, int number) {
  return ROLE == CONSUMER ? candidate_entry(p.candidates, row, number) : number;
}

DEVICE void select_largest(const Select& p, Shared& s, const Range& range, int wanted, int ranks, int row, bool blocks,
                           i32* out) {
  int lane = lane_id();
  u32 keys[KEYS];
  if (range.batches == 1) load(keys, range, 0);
  u32 border = 0;
#pragma unroll
  for (int pass = 0; pass < 3; pass++) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, width = pass == 2 ? 10 : 11;
    u32 *histogram = s.histogram[pass % 2], *next = s.histogram[(pass + 1) % 2];
    for_batches(keys, range, [&](const u32(&k)[KEYS], int) {
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        bool counts = pass == 0 ? k[i] != 0 : (k[i] ^ border) >> (shift + width) % 32 == 0 && k[i] != 0;
        if (counts) add_atomic(&histogram[k[i] >> shift & ((1u << width) - 1)], 1);
      }
    });
    sync_block();
    if (pass < 2) clear(next);
    if (ranks > 1) merge(s, histogram, ranks);
    find_bin(s, ranks > 1 ? s.total : histogram, wanted);
    border |= (u32)s.bin << shift;
    wanted = s.wanted;
  }

  int above = 0, equal = 0;  // of the warp, then of everything before it
  for_batches(keys, range, [&](const u32(&k)[KEYS], int) {
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      above += count_bits(ballot(k[i] > border));
      equal += count_bits(ballot(k[i] == border));
    }
  });
  int above_end = scan_block<THREADS>(lane ? 0 : above, s.scan[0]);
  int equal_end = scan_block<THREADS>(lane ? 0 : equal, s.scan[1]);
  above = above_end - above;  // lanes of a warp have the same sums
  equal = equal_end - equal;
  if (ranks > 1) {
    if (threadIdx.x == THREADS - 1) {
      s.above = above_end;
      s.equal = equal_end;
    }
    sync_warp();
    cluster_sync();
    for (int rank = 0; rank < cluster_rank(); rank++) {
      above += *cluster_map(&s.above, rank);
      equal += *cluster_map(&s.equal, rank);
    }
    cluster_arrive();
  }
  u32 below = (1u << lane) - 1;
  for_batches(keys, range, [&](const u32(&k)[KEYS], int batch) {
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      u32 over = ballot(k[i] > border), same = ballot(k[i] == border);
      int place = above + count_bits(over & below), tie = equal + count_bits(same & below);
      if (k[i] > border || (k[i] == border && tie < wanted)) {
        int number = range.begin + batch * BATCH + i * 32 + lane;
        out[place + min(tie, wanted)] = blocks ? number : entry_of(p, row, number);
      }
      above += count_bits(over);
      equal += count_bits(same);
    }
  });
  if (ranks > 1) cluster_wait();  // nobody leaves while others read its counts
}

KERNEL(select_best, Select, THREADS, THREADS > 512 ? 1 : 2) {
  launch_dependents();
  Shared& s = *(Shared*)shared_memory();
  if (!p.early) wait_for_dependencies();
  int item = (int)blockIdx.x / p.ranks, rank = (int)blockIdx.x % p.ranks;  // items: rows' choices, then rows' blocks
  bool blocks = item >= p.rows;
  int row = blocks ? item - p.rows : item;
  clear(s.histogram[0]);
  make_plan<THREADS>(s.plan, p.rows, p.row_position, p.row_slot, p.wave_keys);
  sync_block();
  int2 place = s.plan.places[row];  // if the row needs scores
  int visible = visible_entries(s.plan.position[row], s.plan.slot[row]);
  int count = blocks ? blocks_of(visible) : eligible_entries(visible), wanted = blocks ? CANDIDATE_BLOCKS : TOPK;
  i32* out = (blocks ? p.block_list : p.chosen) + (i64)row * wanted;
  if (p.early) wait_for_dependencies();
  if (count <= wanted) {  // all of them
    if (p.wave == 0 && rank == 0)
      for (int i = threadIdx.x; i < wanted; i += THREADS) out[i] = i >= count ? -1 : blocks ? i : entry_of(p, row, i);
    return;
  }
  int ranks = count > THREADS * KEYS ? p.ranks : 1;
  if (place.x != p.wave || rank >= ranks) return;
  int length = ((count + ranks * WARPS - 1) / (ranks * WARPS) + 31) / 32 * 32;
  Range range;
  range.keys = blocks ? p.block_keys + place.y / BLOCK_ENTRIES : p.keys + place.y;
  range.begin = (rank * WARPS + warp_id()) * length;
  range.end = min(range.begin + length, count);
  range.batches = (length + BATCH - 1) / BATCH;
  range.forced = blocks ? (visible - 1) / BLOCK_ENTRIES : -1;
  select_largest(p, s, range, wanted, ranks, row, blocks, out);
}
