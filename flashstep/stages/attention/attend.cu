// Sparse attention over the window and the chosen compressed entries (section 5), and the window write on its own.
//
// attend: SPLIT blocks (a cluster) share a row. Each takes a part of the row's entries, ENTRIES at a time:
//   1. expand: fp8 and fp4 entries become bf16 in shared memory, two neighbouring entries interleaved: a word holds
//      one column of both, which is what the second product reads as it is, and the first after two byte permutations;
//   2. scores = q k: m16n8k16 with the heads as m (padded to 16). Warps split the columns, and the entries in two;
//   3. softmax over the chunk, with the running maximum of this block; probabilities rounded to bf16;
//   4. o += p v: every warp owns 64 columns.
// Then every block gets its share of the columns from all blocks of the cluster, joins them with the sink, divides,
// rotates back and stores. Nothing is summed in an order that depends on time or on other rows.
//
// Entries are kept as 2^-8 of their values: an e2m1 code moved into the bits of a bf16 is 2^-126 of its value, and
// that times 2^118 and the scale is one product whose factor bf16 can hold. Both products give the 2^8 back in float32.
#include "attention/window.cuh"

constexpr int WARPS = HEAD_DIM / 64, THREADS = 32 * WARPS;  // every warp owns 64 columns of the output
constexpr int N_WARPS = WARPS > 1 ? 2 : 1, K_WARPS = WARPS / N_WARPS, SLICES = WARPS / K_WARPS;  // of the first product
constexpr int PAIRS = ENTRIES / 2, GROUPS_OF_16 = ENTRIES / 16, PAIRS_OF_WARP = (PAIRS + WARPS - 1) / WARPS;
constexpr int GROUPS_OF_WARP = (GROUPS_OF_16 + N_WARPS - 1) / N_WARPS;
constexpr int PAIR_WORDS = HEAD_DIM + 8;  // 16-byte pieces of a pair: 2 modulo 8, so no two lanes meet in a bank
constexpr int SCORES = ENTRIES + (ENTRIES % 32 == 16 ? 0 : 16);  // 16-byte pieces of a row: 4 modulo 8
constexpr int PROBABILITIES = ENTRIES + 8;
constexpr bool ONE_CHUNK = (MAX_PAIRS + SPLIT - 1) / SPLIT <= PAIRS;  // of entries is all that a block ever has
constexpr int COLUMNS = HEAD_DIM / SPLIT;  // of the output that a block stores
constexpr int TURNING = HEAD_DIM - ROPE;   // columns from here on turn

static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM <= 512 && (WARPS == 1 || WARPS % 2 == 0), "columns");
static_assert(ROPE % 8 == 0 && ROPE <= HEAD_DIM && HEADS <= 16 && HEADS % OUT_GROUPS == 0, "heads");
static_assert(ENTRIES % 16 == 0 && PAIRS_OF_WARP <= 16 && COLUMNS % 8 == 0 && HEAD_DIM % SPLIT == 0, "splits");

DEVICE float never() { return as_float(0xFF800000u); }  // minus infinity: the score of what is not there

struct Shared {
  alignas(16) u32 pairs[PAIRS][PAIR_WORDS];  // word of column c: `pair_word`; low half the even entry
  union {
    alignas(16) float scores[K_WARPS][16][SCORES];          // parts of the first product
    alignas(16) float gathered[SPLIT][HEADS][COLUMNS + 4];  // outputs of all blocks, not yet divided
  };
  alignas(16) bf16 probabilities[16][PROBABILITIES];
  float bias[ENTRIES];  // 0, or -infinity for what is no entry
  float sink[16], highest[16], total[16], rescale[16];
  float gathered_highest[SPLIT][16], gathered_total[SPLIT][16];
  float sine[ROPE / 2], cosine[ROPE / 2];
};
static_assert(sizeof(Shared) <= SHARED, "the launch asks for SHARED bytes");

// Words of a pair: per slice of 64 columns the first halves of its eight words of 8 columns, then the second halves.
// Lanes that read or write neighbouring words of 8 columns then touch neighbouring 16-byte pieces.
DEVICE int pair_word(int slice, int word, int half) { return slice * 64 + half * 32 + word * 4; }

// Four columns (nibbles 0..3 of each half of `codes`) of two fp4 entries; `scales` holds 2^118 of both scales.
DEVICE uint4 expand_fp4(u32 codes, u32 scales) {
  const u32 SIGN = 0x80008000u, REST = 0x01C001C0u;
  uint4 out;
  out.x = multiply_bf16x2(((codes << 12) & SIGN) | ((codes << 6) & REST), scales);
  out.y = multiply_bf16x2(((codes << 8) & SIGN) | ((codes << 2) & REST), scales);
  out.z = multiply_bf16x2(((codes << 4) & SIGN) | ((codes >> 2) & REST), scales);
  out.w = multiply_bf16x2((codes & SIGN) | ((codes >> 6) & REST), scales);
  return out;
}

// One column of two fp8 entries: the bytes of `codes` are the code of the even entry twice, then the odd one's.
DEVICE u32 expand_fp8(u32 codes, u32 scales) {
  u32 bits = (codes & 0x80008000u) | ((codes >> 4) & 0x07F007F0u);
  return multiply_bf16x2(multiply_bf16x2(bits, 0x7B807B80u), scales);  // 2^120: the difference of the biases
}
DEVICE uint4 expand_fp8(u32 even, u32 odd, u32 scales) {
  uint4 out;
  out.x = expand_fp8(permute_bytes(even, odd, 0x4400), scales);
  out.y = expand_fp8(permute_bytes(even, odd, 0x5511), scales);
  out.z = expand_fp8(permute_bytes(even, odd, 0x6622), scales);
  out.w = expand_fp8(permute_bytes(even, odd, 0x7733), scales);
  return out;
}

// The byte at `p` from L2, as the aligned word that holds it and the shift that brings it down.
DEVICE u32 load_byte(const u8* p) {
  u64 address = (u64)p;
  return (load_l2((const u32*)(address & ~(u64)3)) >> (8 * (int)(address & 3))) & 255u;
}

// Codes of 16 columns (the lane's) and their scales, of both entries of a pair.
struct Raw {
  uint4 even, odd;  // fp8; fp4 in x and y
  u32 scales;       // of the even entry in bits 0..7, of the odd one in bits 8..15
};

DEVICE u32 load_fp8(uint4& codes, const u8* all_codes, const u8* all_scales, int place, int lane) {
  codes = load_l2((const uint4*)(all_codes + (i64)place * HEAD_DIM + 16 * lane));
  return load_byte(all_scales + (i64)place * (HEAD_DIM / 32) + lane / 2);
}
DEVICE u32 load_fp4(uint4& codes, const u8* all_codes, const u8* all_scales, int place, int lane) {
  uint2 half = load_l2((const uint2*)(all_codes + (i64)place * (HEAD_DIM / 2) + 8 * lane));
  codes.x = half.x, codes.y = half.y;
  return load_byte(all_scales + (i64)place * (HEAD_DIM / 16) + lane);
}

DEVICE void store_pair(u32* pair, const Raw& raw, bool is_fp8, int lane) {
  // Odd slices start with their odd word: the eight lanes that store together then meet in no bank.
  int slice = lane / 4, swap = slice & 1, word = 2 * (lane % 4);
  if (is_fp8) {
    u32 scales = (u32)max((int)(raw.scales & 255u) - 8, 0) << 7 | (u32)max((int)(raw.scales >> 8) - 8, 0) << 23;
    uint4 even = raw.even, odd = raw.odd;
    if (swap) even = make_uint4(even.z, even.w, even.x, even.y), odd = make_uint4(odd.z, odd.w, odd.x, odd.y);
    *(uint4*)(pair + pair_word(slice, word + swap, 0)) = expand_fp8(even.x, odd.x, scales);
    *(uint4*)(pair + pair_word(slice, word + swap, 1)) = expand_fp8(even.y, odd.y, scales);
    *(uint4*)(pair + pair_word(slice, word + 1 - swap, 0)) = expand_fp8(even.z, odd.z, scales);
    *(uint4*)(pair + pair_word(slice, word + 1 - swap, 1)) = expand_fp8(even.w, odd.w, scales);
  } else {
    u32 scales = multiply_bf16x2(e4m3x2_to_bf16x2(raw.scales), 0x7A807A80u);  // 2^118
    u32 even0 = swap ? raw.even.y : raw.even.x, even1 = swap ? raw.even.x : raw.even.y;
    u32 odd0 = swap ? raw.odd.y : raw.odd.x, odd1 = swap ? raw.odd.x : raw.odd.y;
    *(uint4*)(pair + pair_word(slice, word + swap, 0)) = expand_fp4(permute_bytes(even0, odd0, 0x5410), scales);
    *(uint4*)(pair + pair_word(slice, word + swap, 1)) = expand_fp4(permute_bytes(even0, odd0, 0x7632), scales);
    *(uint4*)(pair + pair_word(slice, word + 1 - swap, 0)) = expand_fp4(permute_bytes(even1, odd1, 0x5410), scales);
    *(uint4*)(pair + pair_word(slice, word + 1 - swap, 1)) = expand_fp4(permute_bytes(even1, odd1, 0x7632), scales);
  }
}

// Which entries a row sees, in pairs: those of the window first, then the chosen ones (or the draft block's own).
struct Visible {
  int slot;
  int first, count;        // positions of the window's entries
  int window_pairs;
  int others;              // chosen entries, or rows of the draft block
  int complete;            // window entries of positions below this were there before the step
  bool others_complete;
};

DEVICE Visible find_visible(const Attend& p, int row, int slot, int position) {
  Visible v;
  v.slot = slot;
  int last = BLOCK ? load_l2(p.row_last + row) : position;
  v.first = max(0, last - WINDOW + 1);
  v.count = max(0, last + 1 - v.first);
  v.window_pairs = (v.count + 1) / 2;
  v.others = BLOCK ? BLOCK : p.chosen ? min(p.topk, (position + 1) / p.ratio) : 0;
  v.others_complete = !BLOCK && p.early > 1;
  v.complete = last + 1 - p.fresh;
  if (!BLOCK && p.early) {  // the rows of a request are consecutive: how many stand in front of this one
    int before = 0;
    for (u32 other = 0; !other; before += other ? lowest_bit(other) : 32) {
      int index = row - 1 - before - lane_id();
      other = ballot(index < 0 || load_l2(p.row_slot + max(index, 0)) != slot);
    }
    v.complete = position - before;
  }
  return v;
}

// Expand this warp's pairs among first..end - 1 (pair `first` goes to place 0). Pass 0 takes those that are complete,
// pass 1 the others, or all if there was no pass 0.
DEVICE void expand(const Attend& p, Shared& s, const Visible& v, int row, int first, int end, int pass,
                   bool two_passes) {
  int lane = lane_id(), warp = warp_id();
  int filled = (min(PAIRS, end - first) + 7) / 8 * 8;  // whole groups are multiplied
  // Lane 2 k + e finds entry e of the warp's k-th pair.
  int index = warp + WARPS * (lane / 2), pair = first + index, which = 2 * pair + lane % 2;
  bool exists = lane < 2 * PAIRS_OF_WARP && index < PAIRS && pair < end, window = pair < v.window_pairs;
  if (!window) which -= 2 * v.window_pairs;
  exists = exists && which < (window ? v.count : v.others);
  bool late = exists && (window ? v.first + which >= v.complete : !v.others_complete);
  u32 late_lanes = ballot(two_passes && late);
  bool mine = !two_passes || (pass == 1) == ((late_lanes >> (lane & ~1) & 3u) != 0);
  int place = -1;
  if (exists && mine) {
    if (window) {
      place = v.slot * p.ring + (v.first + which) % p.ring;
    } else if (BLOCK) {
      place = row - row % (BLOCK ? BLOCK : 1) + which;
    } else {
      int entry = load_l2(p.chosen + (i64)row * p.topk + which);
      if (entry >= 0) {
        int page = load_l2(p.page_table + (i64)v.slot * p.pages_per_slot + entry / p.entries_per_page);
        place = page * p.entries_per_page + entry % p.entries_per_page;
      }
    }
  }
  if (mine && lane < 2 * PAIRS_OF_WARP && index < PAIRS) s.bias[2 * index + lane % 2] = place < 0 ? never() : 0.0f;

  Raw raw[PAIRS_OF_WARP];
#pragma unroll
  for (int k = 0; k < PAIRS_OF_WARP; k++) {  // all loads before the first use
    int even = shuffle(place, 2 * k), odd = shuffle(place, 2 * k + 1);
    bool in_window = first + warp + WARPS * k < v.window_pairs;
    raw[k].even = raw[k].odd = make_uint4(0, 0, 0, 0);
    raw[k].scales = 0;
    if (lane < HEAD_DIM / 16) {
      if (BLOCK || in_window) {
        const u8* codes = BLOCK && !in_window ? p.own_codes : p.window_codes;
        const u8* scales = BLOCK && !in_window ? p.own_scales : p.window_scales;
        if (even >= 0) raw[k].scales = load_fp8(raw[k].even, codes, scales, even, lane);
        if (odd >= 0) raw[k].scales |= load_fp8(raw[k].odd, codes, scales, odd, lane) << 8;
      } else {
        if (even >= 0) raw[k].scales = load_fp4(raw[k].even, p.entry_codes, p.entry_scales, even, lane);
        if (odd >= 0) raw[k].scales |= load_fp4(raw[k].odd, p.entry_codes, p.entry_scales, odd, lane) << 8;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < PAIRS_OF_WARP; k++) {
    int to = warp + WARPS * k;
    bool in_pass = !two_passes || (pass == 1) == ((late_lanes >> (2 * k) & 3u) != 0);
    if (in_pass && to < filled && lane < HEAD_DIM / 16)
      store_pair(s.pairs[to], raw[k], BLOCK || first + to < v.window_pairs, lane);
  }
}

// The words of 8 columns of q that this lane multiplies: [slice][word lane % 4 or + 4][head lane / 4 or + 8].
struct Query { uint4 words[SLICES][2][2]; };

DEVICE int query_column(int slice, int y) {
  return ((warp_id() % K_WARPS) * SLICES + slice) * 64 + (lane_id() % 4 + 4 * y) * 8;
}

DEVICE void load_query(Query& q, const bf16* row_q) {
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
    for (int y = 0; y < 2; y++)
#pragma unroll
      for (int z = 0; z < 2; z++) {
        int head = lane_id() / 4 + 8 * z;
        const bf16* from = row_q + head * HEAD_DIM + query_column(slice, y);
        q.words[slice][y][z] = head < HEADS ? load_l2((const uint4*)from) : make_uint4(0, 0, 0, 0);
      }
}

DEVICE u32 rotate_packed(u32 pair, float sine, float cosine) {
  float x = bf16x2_low(pair), y = bf16x2_high(pair);
  rotate_pair(x, y, sine, cosine);
  return f32x2_to_bf16x2(x, y);
}

// Rotate, and order the words as the first product takes them: lanes 2 and 3 of four read column pairs the other way
// round (`score`), so that the four read different banks.
DEVICE void arrange_query(Query& q, const Shared& s) {
  bool swap = lane_id() % 4 >= 2;
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
    for (int y = 0; y < 2; y++) {
      int turn = (query_column(slice, y) - TURNING) / 2;
#pragma unroll
      for (int z = 0; z < 2; z++) {
        uint4 w = q.words[slice][y][z];
        if (query_column(slice, y) >= TURNING) {
          w.x = rotate_packed(w.x, s.sine[turn], s.cosine[turn]);
          w.y = rotate_packed(w.y, s.sine[turn + 1], s.cosine[turn + 1]);
          w.z = rotate_packed(w.z, s.sine[turn + 2], s.cosine[turn + 2]);
          w.w = rotate_packed(w.w, s.sine[turn + 3], s.cosine[turn + 3]);
        }
        q.words[slice][y][z] = swap ? make_uint4(w.y, w.x, w.w, w.z) : w;
      }
    }
}

// This warp's part of the scores of `groups` groups of 16 entries.
DEVICE void score(Shared& s, const Query& q, int groups) {
  int lane = lane_id(), k_warp = warp_id() % K_WARPS, n_warp = warp_id() / K_WARPS;
  int g = lane / 4, quad = lane % 4, swap = quad / 2;
#pragma unroll
  for (int i = 0; i < GROUPS_OF_WARP; i++) {
    int group = i * N_WARPS + n_warp;
    if (group >= groups) break;
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u32* pair = s.pairs[8 * group + g];
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
      for (int y = 0; y < 2; y++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32* words = pair + pair_word(k_warp * SLICES + slice, quad + 4 * y, half);
          uint2 b0 = *(const uint2*)(words + 2 * swap), b1 = *(const uint2*)(words + 2 - 2 * swap);
          const uint4 &low = q.words[slice][y][0], &high = q.words[slice][y][1];
          u32 a0 = half ? low.z : low.x, a1 = half ? high.z : high.x;
          u32 a2 = half ? low.w : low.y, a3 = half ? high.w : high.y;
          mma_bf16(even, a0, a1, a2, a3, permute_bytes(b0.x, b0.y, 0x5410), permute_bytes(b1.x, b1.y, 0x5410));
          mma_bf16(odd, a0, a1, a2, a3, permute_bytes(b0.x, b0.y, 0x7632), permute_bytes(b1.x, b1.y, 0x7632));
        }
    *(float4*)&s.scores[k_warp][g][16 * group + 4 * quad] = make_float4(even[0], odd[0], even[1], odd[1]);
    *(float4*)&s.scores[k_warp][g + 8][16 * group + 4 * quad] = make_float4(even[2], odd[2], even[3], odd[3]);
  }
}

// Probabilities of the chunk against the block's maximum so far; what they replace is scaled by `rescale`.
DEVICE void soften(Shared& s, int entries, bool first) {
  constexpr int EACH = (ENTRIES + 31) / 32;
  int lane = lane_id();
#pragma unroll
  for (int i = 0; i < (HEADS + WARPS - 1) / WARPS; i++) {
    int head = warp_id() + WARPS * i;
    if (head >= HEADS) break;
    float x[EACH], highest = never(), total = 0.0f;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      int entry = lane + 32 * n;
      x[n] = never();
      if (entry < entries) {
        x[n] = s.scores[0][head][entry];
#pragma unroll
        for (int k = 1; k < K_WARPS; k++) x[n] += s.scores[k][head][entry];
        x[n] = x[n] * (256.0f * SCALE) + s.bias[entry];
      }
      highest = fmaxf(highest, x[n]);
    }
    float before = first ? never() : s.highest[head];
    highest = fmaxf(before, warp_max(highest));
    float against = highest == never() ? 0.0f : highest;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      x[n] = exp_fast(x[n] - against);
      total += x[n];
      if (lane + 32 * n < ENTRIES) s.probabilities[head][lane + 32 * n] = f32_to_bf16(x[n]);
    }
    total = warp_sum(total);
    if (lane == 0) {
      float rescale = exp_fast(before - against);
      s.total[head] = first ? total : s.total[head] * rescale + total;
      s.highest[head] = highest;
      s.rescale[head] = rescale;
    }
  }
}

// Output accumulators: columns 64 warp + 16 (lane % 4) + 0..7 are [0..7][0] (head lane / 4) and [..][2] (8 heads on),
// the next eight columns [..][1] and [..][3].
struct Output { float d[8][4]; };

DEVICE void accumulate(const Shared& s, Output& o, int groups, bool first) {
  int lane = lane_id(), g = lane / 4, quad = lane % 4;
  if (!first) {
    float low = s.rescale[g], high = g + 8 < HEADS ? s.rescale[(g + 8) & 15] : 0.0f;
    if (g >= HEADS) low = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) o.d[j][0] *= low, o.d[j][1] *= low, o.d[j][2] *= high, o.d[j][3] *= high;
  }
  // With accumulators that live from chunk to chunk, this loop would spill if it were unrolled.
#pragma unroll(ONE_CHUNK ? GROUPS_OF_16 : 1)
  for (int group = 0; group < GROUPS_OF_16; group++) {
    if (group >= groups) break;
    const bf16* low = &s.probabilities[g][16 * group + 2 * quad];
    const bf16* high = &s.probabilities[g + 8][16 * group + 2 * quad];
    u32 a0 = *(const u32*)low, a1 = *(const u32*)high, a2 = *(const u32*)(low + 8), a3 = *(const u32*)(high + 8);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 b0 = *(const uint4*)(s.pairs[8 * group + quad] + pair_word(warp_id(), g, half));
      uint4 b1 = *(const uint4*)(s.pairs[8 * group + quad + 4] + pair_word(warp_id(), g, half));
      mma_bf16(o.d[4 * half], a0, a1, a2, a3, b0.x, b1.x);
      mma_bf16(o.d[4 * half + 1], a0, a1, a2, a3, b0.y, b1.y);
      mma_bf16(o.d[4 * half + 2], a0, a1, a2, a3, b0.z, b1.z);
      mma_bf16(o.d[4 * half + 3], a0, a1, a2, a3, b0.w, b1.w);
    }
  }
}

// Eight columns of a head to the block that stores them.
template <int PART> DEVICE void hand_over(Shared& s, const Output& o, int rank, int head, int column) {
  if (head >= HEADS) return;
  float* to = &s.gathered[rank][head][column % COLUMNS];
  if (SPLIT > 1) to = cluster_map(to, column / COLUMNS);
  *(float4*)to = make_float4(o.d[0][PART], o.d[1][PART], o.d[2][PART], o.d[3][PART]);
  *(float4*)(to + 4) = make_float4(o.d[4][PART], o.d[5][PART], o.d[6][PART], o.d[7][PART]);
}

DEVICE bf16* output_place(const Attend& p, int row, int head, int column) {
  constexpr int HEADS_OF_GROUP = HEADS / OUT_GROUPS, PIECES = HEADS_OF_GROUP * HEAD_DIM / 8;
  int group = head / HEADS_OF_GROUP, k = head % HEADS_OF_GROUP * HEAD_DIM + column, tiles = (p.rows + 7) / 8;
  return p.out + (((i64)group * tiles + row / 8) * PIECES + k / 8) * 64 + row % 8 * 8 + k % 8;
}

// At most 128 registers: two blocks share a multiprocessor, or one block and the kernel before it.
KERNEL(attend, Attend, THREADS, 2) {
  Shared& s = *(Shared*)shared_memory();
  const int row = (int)blockIdx.x / SPLIT, rank = (int)blockIdx.x % SPLIT, thread = (int)threadIdx.x;
  launch_dependents();
  bool waited = p.early == 0;
  if (waited) wait_for_dependencies();
  int slot = load_l2(p.row_slot + row), position = load_l2(p.row_position + row);
  if (slot < 0) {
    if (!waited) wait_for_dependencies();
    for (int i = thread; i < HEADS * COLUMNS / 4; i += THREADS)
      *(uint2*)output_place(p, row, i / (COLUMNS / 4), rank * COLUMNS + i % (COLUMNS / 4) * 4) = make_uint2(0, 0);
    return;  // all blocks of the cluster
  }
  Visible v = find_visible(p, row, slot, position);
  int pairs = v.window_pairs + (v.others + 1) / 2, each = (pairs + SPLIT - 1) / SPLIT;
  int begin = min(rank * each, pairs), end = min(begin + each, pairs);

  for (int i = thread; i < ROPE / 2; i += THREADS)
    sincos_accurate((float)position * p.frequencies[i], &s.sine[i], &s.cosine[i]);
  if (thread < 16) s.sink[thread] = thread < HEADS ? p.sink[thread] : 0.0f;
  for (int i = thread + HEADS * PROBABILITIES; i < 16 * PROBABILITIES; i += THREADS)
    s.probabilities[i / PROBABILITIES][i % PROBABILITIES] = 0;  // rows that are no heads

  Query q;
  Output o;
#pragma unroll
  for (int j = 0; j < 8; j++) o.d[j][0] = o.d[j][1] = o.d[j][2] = o.d[j][3] = 0.0f;
#pragma unroll 1
  for (int chunk = begin; chunk < end; chunk += PAIRS) {
    bool first = chunk == begin, two_passes = !waited;
    int groups = (min(PAIRS, end - chunk) + 7) / 8;
    if (!first) sync_block();  // the products with the entries before are done
#pragma unroll 1
    for (int pass = waited ? 1 : 0; pass < 2; pass++) {
      if (pass && !waited) wait_for_dependencies();
      waited = waited || pass;
      if (pass && first) load_query(q, p.q + (i64)row * HEADS * HEAD_DIM);
      expand(p, s, v, row, chunk, end, pass, two_passes);
    }
    sync_block();
    if (first) arrange_query(q, s);
    score(s, q, groups);
    sync_block();
    soften(s, 16 * groups, first);
    // Scores are read for the last time: from here on other blocks may put their outputs in their place.
    if (SPLIT > 1 && chunk + PAIRS >= end) cluster_arrive();
    sync_block();
    accumulate(s, o, groups, first);
    if (ONE_CHUNK) break;  // told to the compiler: nothing lives from one chunk to the next
  }
  if (!waited) wait_for_dependencies();

  if (SPLIT > 1) {
    if (begin >= end) cluster_arrive();
    cluster_wait();
  }
  int g = lane_id() / 4, column = 64 * warp_id() + 16 * (lane_id() % 4);
  hand_over<0>(s, o, rank, g, column);
  hand_over<1>(s, o, rank, g, column + 8);
  hand_over<2>(s, o, rank, g + 8, column);
  hand_over<3>(s, o, rank, g + 8, column + 8);
  for (int i = thread; i < 32 * SPLIT; i += THREADS) {
    int head = i % 16;
    bool any = begin < end && head < HEADS;
    float* to = i & 16 ? &s.gathered_total[rank][head] : &s.gathered_highest[rank][head];
    if (SPLIT > 1) to = cluster_map(to, i / 32);
    *to = i & 16 ? (any ? s.total[head] : 0.0f) : (any ? s.highest[head] : never());
  }
  if (SPLIT > 1) cluster_sync();
  else sync_block();

  for (int i = thread; i < HEADS * COLUMNS / 4; i += THREADS) {
    int head = i / (COLUMNS / 4), own = i % (COLUMNS / 4) * 4, to = rank * COLUMNS + own;
    float highest = s.sink[head], x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < SPLIT; r++) highest = fmaxf(highest, s.gathered_highest[r][head]);
    uint2 packed = make_uint2(0, 0);
    if (highest != never()) {  // else there is neither an entry nor a sink
      float total = s.sink[head] == highest ? 1.0f : exp_fast(s.sink[head] - highest);
#pragma unroll
      for (int r = 0; r < SPLIT; r++) {
        float factor = exp_fast(s.gathered_highest[r][head] - highest);
        float4 part = *(const float4*)&s.gathered[r][head][own];
        total += s.gathered_total[r][head] * factor;
        x[0] += part.x * factor, x[1] += part.y * factor, x[2] += part.z * factor, x[3] += part.w * factor;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = round_bf16(x[j] * 256.0f / total);
      if (to >= TURNING) {
        int turn = (to - TURNING) / 2;
        rotate_pair(x[0], x[1], -s.sine[turn], s.cosine[turn]);
        rotate_pair(x[2], x[3], -s.sine[turn + 1], s.cosine[turn + 1]);
      }
      packed = make_uint2(f32x2_to_bf16x2(x[0], x[1]), f32x2_to_bf16x2(x[2], x[3]));
    }
    *(uint2*)output_place(p, row, head, to) = packed;
  }
}
