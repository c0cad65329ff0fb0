// The draft's token chain: `markov` once per place of the block, then `settle`.
//
// Each `markov` adds to its place's base logits what the token before adds (embed row x head, bf16 products summed in
// float32) and finds the place's token: a warp owns two strips of 16 tokens of the vocabulary and holds their whole
// weight rows, the one in registers, the other in shared memory, so that the next place's kernel finds room to load its
// own beside them. They are asked for before the kernel waits. What is left of a place crosses to the next kernel as one
// record per block, which every block of that kernel merges again, in the same order and so to the same token. The
// records are also what crosses vocabulary shards: a slab [blocks][places][8 words] in every peer's mailbox.
// Blocks behind the product's, one per place, do the bookkeeping: the token before, and this place's confidence.
//
// A request at a temperature draws by a race of exponentials (reference.draft_tokens without filters: acceptance is
// exact for any q that was drawn from); a greedy one takes the maximum. Logits that are not finite end the block.
//
// Compiled with VOCAB (of the shard, a multiple of 16), RANK, HIDDEN, BLOCK, WORLD, WARPS, TILES (8 places each),
// DRAFTS (places that are drafted), MARKOV_SHARED (bytes).
#include "accept/sampling.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int UNITS = RANK / 16;        // of 16 tokens: 512 B each, in registers
constexpr int STRIPS = VOCAB / 16;
constexpr int BLOCK_STRIPS = 2 * WARPS;
constexpr int BLOCKS = (STRIPS + BLOCK_STRIPS - 1) / BLOCK_STRIPS;
constexpr int PLACES = 8 * TILES;
constexpr int EMBED_STRIDE = RANK + 8;  // so that the eight places of a product read different banks
constexpr int TILE_STRIDE = 20;
constexpr int RECORD_WORDS = 8;
static_assert(VOCAB % 16 == 0 && RANK % 16 == 0 && HIDDEN % 8 == 0, "whole units and pieces");

// A part of a place's logits: maximum, sum of exponentials (NaN: some logit is not finite), and the best of the race,
// its score relative to the maximum. Greedy: the score is the logit.
struct Found {
  float max, sum, score, logit;
  i32 id;
};
DEVICE Found nothing() { return Found{negative_infinity(), 0, negative_infinity(), 0, NO_ID}; }

DEVICE float rescale(const Found& f, float max, float inverse) {
  return f.id == NO_ID ? 1.0f : softmax_weight(f.max, max, inverse);  // inverse 0: 1
}
DEVICE void rebase(Found& f, float max, float inverse) {
  float scale = rescale(f, max, inverse);
  f.sum *= scale;
  f.score *= scale;
  f.max = max;
}
DEVICE void take_better(Found& f, float score, i32 id, float logit) {
  if (beats(score, id, f.score, f.id)) f.score = score, f.id = id, f.logit = logit;
}
DEVICE void merge(Found& f, Found other, float inverse) {
  float max = fmaxf(f.max, other.max);
  rebase(f, max, inverse);
  rebase(other, max, inverse);
  f.sum += other.sum;
  take_better(f, other.score, other.id, other.logit);
}
DEVICE void merge_warp(Found& f, float inverse) {
  rebase(f, warp_max(f.max), inverse);
  f.sum = warp_sum(f.sum);
#pragma unroll
  for (int m = 16; m; m >>= 1) {
    float score = shuffle_xor(f.score, m), logit = shuffle_xor(f.logit, m);
    take_better(f, score, shuffle_xor(f.id, m), logit);
  }
}

struct Drawn {
  Found found;
  bool usable;
};

// What was drawn in the step that wrote `records`, for one place; a whole warp. `inverse_of_place` is called once the
// first records are on their way, for it waits for loads of its own.
template <class F> DEVICE Drawn draw(const u32* records, int num_places, int place, F inverse_of_place) {
  constexpr int BATCH = 4, TOTAL = WORLD * BLOCKS;
  Found all = nothing();
  float inverse = 0;
  for (int base = 0; base < TOTAL; base += 32 * BATCH) {
    Found part[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      int index = base + 32 * k + lane_id();
      part[k] = nothing();
      if (index < TOTAL) {
        const uint4* at = (const uint4*)(records + ((i64)index * num_places + place) * RECORD_WORDS);
        uint4 a = load_l2(at);
        part[k] = Found{as_float(a.x), as_float(a.y), as_float(a.z), as_float(a.w), (i32)load_l2((const u32*)(at + 1))};
      }
    }
    if (base == 0) inverse = inverse_of_place();
#pragma unroll
    for (int k = 0; k < BATCH; k++) merge(all, part[k], inverse);
  }
  merge_warp(all, inverse);
  bool usable = is_finite(all.sum);
  if (!usable) all.id = 0;  // something that can be looked up; nobody will read it
  return Drawn{all, usable};
}

// ... and written down: the draft's token and what q is.
DEVICE void write_down(int* tokens, float* draft_stats, int slot, int index, const Drawn& d) {
  tokens[slot * (BLOCK + 1) + 1 + index] = d.found.id;
  *(uint4*)(draft_stats + (slot * BLOCK + index) * 4) =
      make_uint4(as_bits(d.found.max), as_bits(d.found.sum), as_bits(d.found.logit), d.usable);
}

KERNEL(markov, Markov, THREADS, TILES <= 2 ? 2 : 1) {
  struct Shared {
    alignas(16) uint4 weights[WARPS][UNITS][32];  // of every warp's second strip
    u16 embed[PLACES][EMBED_STRIDE];
    float tile[WARPS][8][TILE_STRIDE];
    Found found[BLOCK_STRIPS][PLACES];
    u64 here[WARPS];  // the weights
    u64 seed[PLACES];
    float inverse[PLACES];
    i32 slot[PLACES], start[PLACES], before[PLACES];
    float sums[WARPS];
  };
  static_assert(sizeof(Shared) <= MARKOV_SHARED, "cuda.py reserves too little");
  Shared& s = *(Shared*)shared_memory();
  launch_dependents();
  int warp = warp_id(), lane = lane_id(), first_strip = blockIdx.x * BLOCK_STRIPS + 2 * warp;
  bool product = blockIdx.x < BLOCKS;
  const u16* head = p.head + (i64)first_strip * UNITS * 256;
  if (product && lane == 0) {
    barrier_init(&s.here[warp], 1);
    barrier_init_fence();
    barrier_expect(&s.here[warp], first_strip + 1 < STRIPS ? UNITS * 512 : 0);
    if (first_strip + 1 < STRIPS) bulk_copy(s.weights[warp], head + UNITS * 256, UNITS * 512, &s.here[warp]);
  }
  uint4 weights[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; u++)
    weights[u] = product && first_strip < STRIPS ? load_stream(head + (u * 32 + lane) * 8) : make_uint4(0, 0, 0, 0);
  wait_for_dependencies();

  // Lane (n, g) of tile t will own tokens 4 g .. 4 g + 3 of a strip for place 8 t + n.
  int n = lane / 4, g = lane % 4;
  uint4 base[2][TILES];
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      base[k][t] = make_uint4(0, 0, 0, 0);
      int place = 8 * t + n, strip = first_strip + k;
      if (product && strip < STRIPS && place < p.num_places)
        base[k][t] = load_l2((const uint4*)(p.base + ((i64)place * BLOCK + p.index) * VOCAB + 16 * strip + 4 * g));
    }

  auto look_up = [&](int place, bool keep) {  // a warp: what the token of this place depends on
    int slot = load_l2(p.draft_slot + place * BLOCK), start = 0;
    u64 seed = 0;
    auto read_slot = [&] {
      if (slot < 0) return 0.0f;
      seed = load_l2(p.seed + slot);
      start = load_l2(p.position + slot) + 1;
      return inverse_of(load_l2(p.temperature + slot));
    };
    i32 before = 0;
    float inverse;
    if (p.index == 0) {
      inverse = read_slot();
      if (slot >= 0) before = load_l2(p.tokens + slot * (BLOCK + 1));
    } else {
      Drawn drawn = draw(p.records, p.num_places, place, [&] { return inverse = read_slot(); });
      if (slot >= 0) before = drawn.found.id;
      if (keep && slot >= 0 && lane == 0) write_down(p.tokens, p.draft_stats, slot, p.index - 1, drawn);
    }
    if (lane == 0) {
      s.slot[place] = slot;
      s.before[place] = before;
      s.inverse[place] = inverse;
      s.seed[place] = seed;
      s.start[place] = start;
    }
  };
  int only = (int)blockIdx.x - BLOCKS;  // the place of a bookkeeping block
  if (product)
    for (int place = warp; place < p.num_places; place += WARPS) look_up(place, false);
  else if (warp == 0)
    look_up(only, true);
  sync_block();

  if (!product) {  // the confidence of this place
    int slot = s.slot[only];
    if (slot < 0) return;
    const bf16* hidden = p.hidden + ((i64)only * BLOCK + p.index) * HIDDEN;
    const bf16* embed = p.embed + (i64)s.before[only] * RANK;
    float sum = 0;
    for (int piece = threadIdx.x; piece < (HIDDEN + RANK) / 8; piece += THREADS) {
      uint4 a = piece < HIDDEN / 8 ? load_l2((const uint4*)hidden + piece) : load_stream(embed + piece * 8 - HIDDEN);
      uint4 b = load_stream(p.confidence_weight + piece * 8);
      u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 4; k++)
        sum += bf16x2_low(x[k]) * bf16x2_low(y[k]) + bf16x2_high(x[k]) * bf16x2_high(y[k]);
    }
    sum = warp_sum(sum);
    if (lane == 0) s.sums[warp] = sum;
    sync_block();
    if (threadIdx.x == 0) {
      float total = 0;
      for (int w = 0; w < WARPS; w++) total += s.sums[w];
      p.confidence[slot * BLOCK + p.index] = total;
    }
    return;
  }

  for (int i = threadIdx.x; i < p.num_places * (RANK / 8); i += THREADS) {
    int place = i / (RANK / 8), piece = i % (RANK / 8);
    *(uint4*)&s.embed[place][piece * 8] = load_stream(p.embed + (i64)s.before[place] * RANK + piece * 8);
  }
  sync_block();

  float sums[2][TILES][4];
#pragma unroll
  for (int i = 0; i < 8 * TILES; i++) sums[i / (4 * TILES)][i / 4 % TILES][i % 4] = 0;
  barrier_wait(&s.here[warp], 0);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    uint4 second = s.weights[warp][u][lane];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const u16* at = &s.embed[8 * t + n][16 * u + 2 * g];
      u32 b0 = *(const u32*)at, b1 = *(const u32*)(at + 8);
      mma_bf16(sums[0][t], weights[u].x, weights[u].y, weights[u].z, weights[u].w, b0, b1);
      mma_bf16(sums[1][t], second.x, second.y, second.z, second.w, b0, b1);
    }
  }

#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int t = i / 2, strip = first_strip + i % 2;
    const bool has_strip = strip < STRIPS;
    // A lane's products are of two tokens and two places; random numbers and stores want four tokens of one place.
    const float(&sum)[4] = sums[i % 2][t];
    s.tile[warp][2 * g][n] = sum[0];
    s.tile[warp][2 * g + 1][n] = sum[1];
    s.tile[warp][2 * g][n + 8] = sum[2];
    s.tile[warp][2 * g + 1][n + 8] = sum[3];
    sync_warp();
    float x[4];
    uint4 words = base[i % 2][t];
    u32 b[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = as_float(b[k]) + s.tile[warp][n][4 * g + k];
    sync_warp();

    int place = 8 * t + n, slot = place < p.num_places ? s.slot[place] : -1;
    Found f = nothing();
    float inverse = 0;
    if (has_strip && slot >= 0) {
      inverse = s.inverse[place];
      i32 first = p.first_token + 16 * strip + 4 * g;
      *(uint4*)(p.draft_logits + ((i64)slot * BLOCK + p.index) * VOCAB + 16 * strip + 4 * g) =
          make_uint4(as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3]));
      bool finite = true;
      f.max = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      if (inverse > 0) {
        uint4 words = random_words(s.seed[place], s.start[place], s.start[place] + p.index, DRAFT, (u32)first / 4);
        u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          float weight = softmax_weight(x[k], f.max, inverse);
          f.sum += weight;
          take_better(f, weight / exponential(word[k]), first + k, x[k]);
        }
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) take_better(f, x[k], first + k, x[k]);
      }
#pragma unroll
      for (int k = 0; k < 4; k++) finite &= is_finite(x[k]);
      if (!finite) f.sum = as_float(0x7FC00000u);
    }
    float max = fmaxf(f.max, shuffle_xor(f.max, 1));
    max = fmaxf(max, shuffle_xor(max, 2));
    rebase(f, max, inverse);
#pragma unroll
    for (int m = 1; m < 4; m <<= 1) {
      f.sum += shuffle_xor(f.sum, m);
      float score = shuffle_xor(f.score, m), logit = shuffle_xor(f.logit, m);
      take_better(f, score, shuffle_xor(f.id, m), logit);
    }
    if (g == 0) s.found[2 * warp + i % 2][place] = f;
  }
  sync_block();

  for (int place = warp; place < p.num_places; place += WARPS) {
    if (s.slot[place] < 0) continue;
    float inverse = s.inverse[place];
    Found f = nothing();
    if (lane < BLOCK_STRIPS) f = s.found[lane][place];
    merge_warp(f, inverse);
    if (lane == 0)
      for (int peer = 0; peer < WORLD; peer++) {
        uint4* at = (uint4*)(p.records_out[peer] + ((i64)blockIdx.x * p.num_places + place) * RECORD_WORDS);
        at[0] = make_uint4(as_bits(f.max), as_bits(f.sum), as_bits(f.score), as_bits(f.logit));
        at[1] = make_uint4((u32)f.id, 0, 0, 0);
      }
  }
}

// A warp per place: the last token, and how many drafts the next step verifies. Draft i is cut by confidences up to
// i, which depend on the tokens before it, never on itself or on later ones: else verification would bend the law.
KERNEL(settle, Settle, 32, 1) {
  launch_dependents();
  wait_for_dependencies();
  int place = blockIdx.x, lane = lane_id(), slot = load_l2(p.draft_slot + place * BLOCK);
  if (slot < 0) return;
  Drawn drawn = draw(p.records, p.num_places, place, [&] { return inverse_of(load_l2(p.temperature + slot)); });
  if (lane == 0) write_down(p.tokens, p.draft_stats, slot, DRAFTS - 1, drawn);
  bool is_draft = lane < DRAFTS, usable = drawn.usable;
  if (lane < DRAFTS - 1) usable = load_l2((const u32*)p.draft_stats + (slot * BLOCK + lane) * 4 + 3);
  float threshold = load_l2(p.threshold);
  float survival = is_draft ? 1.0f / (1.0f + exp_accurate(-load_l2(p.confidence + slot * BLOCK + lane))) : 1.0f;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    float before = shuffle_up(survival, d);
    if (lane >= d) survival *= before;
  }
  bool kept = is_draft && usable && (threshold <= 0 || survival >= threshold);
  int count = lowest_bit(~ballot(kept));
  int room = p.max_model_len - (load_l2(p.position + slot) + 1);  // the context may end first
  if (lane == 0) p.num_drafts[slot] = min(count, room);
}
