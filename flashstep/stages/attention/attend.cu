// Sparse attention over the window and the chosen compressed entries (section 5).
//
// attend: SPLIT blocks (a cluster) share a row and up to 16 of its heads; more heads are HEAD_GROUPS clusters. Each
// block takes a fixed part of the row's places for entries, ENTRIES at a time; tiles of 8 hold entries of one kind.
// Warp w of K_WARPS x N_WARPS has a slice of the columns and a part of the tiles, and lane l of it entry l / 4 of a
// tile, columns by l % 4. Per ENTRIES:
//   1. codes become bf16 in shared memory. What a lane puts there of a tile is its operand of the first product
//      (m16n8k16, heads as m, padded to 16). A block that takes its part at once does this before its turn, but for the
//      entries that are not there yet: behind the wait nothing is left but q and products;
//   2. scores = q k: the parts of the K_WARPS slices meet in shared memory;
//   3. softmax with the running maximum of this block; probabilities rounded to bf16;
//   4. o += p v: every warp has WARP_COLUMNS columns of the output.
// Then every block sends its outputs to the blocks that store their columns, as f16 with a scale per head and
// WARP_COLUMNS columns: off by 2^-12 of themselves. Those join the parts with the sink, divide, rotate back and store.
// Nothing is summed in an order that depends on time or on other rows.
//
// Entries are kept as 2^-64 of their values: codes moved into the bits of a bf16 become that by a factor which bf16 can
// hold. Eight columns of an entry (a piece, 16 bytes) are kept in the order 0 4 1 5 2 6 3 7, which costs least.
#include "attention/exchange.cuh"
#include "attention/window.cuh"

constexpr int WARPS = HEAD_DIM / WARP_COLUMNS, THREADS = 32 * WARPS;
constexpr int N_WARPS = 2, K_WARPS = WARPS / N_WARPS;
constexpr int LANE_COLUMNS = HEAD_DIM / K_WARPS / 4, LANE_PIECES = LANE_COLUMNS / 8;  // in the first product
constexpr int WARP_PIECES = WARP_COLUMNS / 8;                        // of the output
constexpr int TILES = ENTRIES / 8, TILES_OF_WARP = TILES / N_WARPS;  // of a chunk
constexpr int OTHER_TILES = (OTHERS + 7) / 8, ROW_TILES = OTHER_TILES + (WINDOW + 7) / 8;
constexpr int BLOCK_TILES = (ROW_TILES + SPLIT - 1) / SPLIT, CHUNKS = (BLOCK_TILES + TILES - 1) / TILES;
constexpr int PLACES = CHUNKS * ENTRIES;
constexpr bool WHOLE = CHUNKS == 1;             // a block's part at once
constexpr int BUFFERS = WHOLE ? 1 : 2;          // one is multiplied, the next one filled
constexpr int ALL_HEADS = HEADS * HEAD_GROUPS;
constexpr int ENTRY_BYTES = 2 * HEAD_DIM + 16;  // an odd number of 16 bytes: rows at the same piece meet in no bank
constexpr int SCORES = ENTRIES + 8;             // 8 or 24 modulo 32: neither stores nor loads meet in a bank
constexpr int PROBABILITIES = ENTRIES + 8;      // an odd number of 16 bytes
constexpr int HEAD_LANES = WARPS >= 16 ? 32 : 16;  // that share a head in the softmax
constexpr int PAIRS_OF_LANE = (ENTRIES + 2 * HEAD_LANES - 1) / (2 * HEAD_LANES);  // of entries
constexpr int HEADS_AT_ONCE = THREADS / HEAD_LANES, HEAD_ROUNDS = (16 + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
constexpr int SLICES = WARPS / SPLIT, COLUMNS = WARP_COLUMNS * SLICES;  // of the output, that a block stores
constexpr int TURNING = HEAD_DIM - ROPE;        // columns from here on turn
constexpr int LATE = 1 << 30;                   // of a place: written by a kernel that may still run
constexpr float KEPT = 5.421010862427522e-20f;  // 2^-64

static_assert(WARP_COLUMNS == 32 || WARP_COLUMNS == 64, "16 or 32 columns of an entry a lane, of one scale of fp8");
static_assert(HEAD_DIM <= 512 && HEAD_DIM % (N_WARPS * WARP_COLUMNS) == 0 && WARPS % SPLIT == 0, "columns");
static_assert(ENTRIES % 16 == 0, "tiles");
static_assert(ROPE % 8 == 0 && ROPE <= HEAD_DIM && HEADS <= 16 && ALL_HEADS % OUT_GROUPS == 0, "heads");

DEVICE float never() { return as_float(0xFF800000u); }  // minus infinity: the score of what is not there

// Outputs and softmax statistics of all blocks of the cluster, for the columns of this block.
struct Mail {
  alignas(16) uint4 outputs[SPLIT][SLICES][HEADS][WARP_PIECES];  // f16, by `mail_piece`
  float scales[SPLIT][SLICES][HEADS];                  // of the outputs, 2^64 in them
  float2 softmax[SPLIT][HEADS];                        // maximum and sum
};

struct Source { const u8 *codes, *scales; };  // of an entry

struct Shared {
  alignas(16) u8 entries[BUFFERS][ENTRIES][ENTRY_BYTES];
  union {
    alignas(16) float scores[K_WARPS][16][SCORES];  // parts of the first product
    Mail mail;                                      // comes when all blocks of the cluster have read their scores
  };
  alignas(16) bf16 probabilities[BUFFERS][16][PROBABILITIES];
  alignas(16) Source sources[PLACES];  // of the block's entries
  alignas(8) int places[PLACES];       // in their caches, or -1; LATE added
  float rescale[BUFFERS][16];
  float2 softmax[16];              // of a row that has only this block
  float2 turns[ROPE / 2];          // sine, cosine
  float sink[16];
  alignas(8) u64 softmax_is_here, outputs_are_here;  // mail
};
static_assert(sizeof(Shared) <= SHARED, "the launch asks for SHARED bytes");

// Where the outputs of lane l % 4 = quad are: four pieces, of a half of the warp's columns if they are 64.
DEVICE int mail_piece(u32 head, u32 quad, u32 half) {
  return (int)(WARP_PIECES == 4 ? quad : (half * 4 + quad) ^ (head & 1) * 4);
}

// ---- entries ------------------------------------------------------------------------------------------------------

// Eight columns of an fp4 entry, columns j and j + 4 in a word; `scale` twice 2^62 of the scale.
DEVICE uint4 expand_fp4(u32 codes, u32 scale) {
  const u32 SIGN = 0x80008000u, REST = 0x01C001C0u;
  uint4 out;
  out.x = multiply_bf16x2(((codes << 12) & SIGN) | ((codes << 6) & REST), scale);
  out.y = multiply_bf16x2(((codes << 8) & SIGN) | ((codes << 2) & REST), scale);
  out.z = multiply_bf16x2(((codes << 4) & SIGN) | ((codes >> 2) & REST), scale);
  out.w = multiply_bf16x2((codes & SIGN) | ((codes >> 6) & REST), scale);
  return out;
}

// The same of fp8: columns 0..3 in `low`, 4..7 in `high`; `scale` twice 2^56 of the scale.
DEVICE u32 expand_fp8(u32 codes, u32 scale) {
  return multiply_bf16x2((codes & 0x80008000u) | ((codes >> 4) & 0x07F007F0u), scale);
}
DEVICE uint4 expand_fp8(u32 low, u32 high, u32 scale) {
  uint4 out;
  out.x = expand_fp8(permute_bytes(low, high, 0x4400), scale);
  out.y = expand_fp8(permute_bytes(low, high, 0x5511), scale);
  out.z = expand_fp8(permute_bytes(low, high, 0x6622), scale);
  out.w = expand_fp8(permute_bytes(low, high, 0x7733), scale);
  return out;
}

// The lane's codes of an entry and their scales: fp8, or fp4 in the first half of `codes`.
struct Raw { u32 codes[LANE_COLUMNS / 4], scales; };

DEVICE bool is_fp8(int tile) { return BLOCK || tile >= OTHER_TILES; }
DEVICE int lane_column() { return (int)((threadIdx.x / 32 % K_WARPS * 4 + (threadIdx.x & 3u)) * LANE_COLUMNS); }

template <int WORDS> DEVICE void load_codes(u32* codes, const u8* from) {
#pragma unroll
  for (int i = 0; i < WORDS / 4; i++) {
    uint4 v = load_l2((const uint4*)from + i);
    codes[4 * i] = v.x, codes[4 * i + 1] = v.y, codes[4 * i + 2] = v.z, codes[4 * i + 3] = v.w;
  }
  if (WORDS % 4) {
    uint2 v = load_l2((const uint2*)from);
    codes[0] = v.x, codes[1] = v.y;
  }
}

// Which entries a row sees.
struct Visible {
  int first, count;  // positions of the window's entries
  int complete;      // window entries of positions below this were there before the step
  int others;        // chosen entries, or rows of the draft block
};

DEVICE int tile_of_warp(int i) { return i * N_WARPS + warp_id() / K_WARPS; }  // in a chunk

// The lane's entry of a tile of the chunk among the block's places.
DEVICE int lane_entry(int chunk, int tile) { return chunk * ENTRIES + 8 * tile + lane_id() / 4; }
DEVICE bool is_late(int place) { return place >= LATE; }

// Load the warp's tiles of a chunk: all entries, or once more those that are late. For what is not there the lane keeps
// what it had: any codes and scales become something finite, and it counts for nothing.
DEVICE void load_entries(Raw (&raw)[TILES_OF_WARP], const Shared& s, int rank, int chunk, bool late) {
  const int column = lane_column();
#pragma unroll
  for (int i = 0; i < TILES_OF_WARP; i++) {
    int entry = lane_entry(chunk, tile_of_warp(i));
    if (late ? !is_late(s.places[entry]) : s.places[entry] < 0) continue;
    Source from = s.sources[entry];
    bool fp8 = is_fp8(rank * BLOCK_TILES + chunk * TILES + tile_of_warp(i));
    const u8* codes = from.codes + (fp8 ? column : column / 2);
    const u8* scales = from.scales + (fp8 ? column / 32 : column / 16);
    load_codes<LANE_COLUMNS / 8>(raw[i].codes, codes);
    if (fp8) load_codes<LANE_COLUMNS / 8>(raw[i].codes + LANE_COLUMNS / 8, codes + LANE_COLUMNS / 2);
    if (LANE_PIECES == 4 && !fp8) raw[i].scales = load_l2((const u16*)scales);
    else raw[i].scales = load_byte_l2(scales);
  }
}

// Twice 2^56 or 2^62 of the scales of a lane's codes.
template <bool FP8> DEVICE u32 expand_scales(u32 scales) {
  if (LANE_PIECES < 4) scales *= 0x101u;
  return FP8 ? (min(scales & 255u, 198u) + 56u) * 0x00800080u : multiply_bf16x2(e4m3x2_to_bf16x2(scales), 0x5E805E80u);
}
// Piece `j` of the lane's.
template <bool FP8> DEVICE uint4 expand_piece(const Raw& raw, u32 scales, int j) {
  return FP8 ? expand_fp8(raw.codes[2 * j], raw.codes[2 * j + 1], scales)
             : expand_fp4(raw.codes[j], permute_bytes(scales, 0, j < 2 ? 0x1010 : 0x3232));
}

// The lane's pieces of its entry of a tile: piece j at `swapped(j)`. Four a lane: lanes 2 and 3 of four have theirs in
// another order, or they would meet the others in banks.
DEVICE u8* lane_pieces(Shared& s, int chunk, int tile) {
  return s.entries[chunk % BUFFERS][8 * tile + lane_id() / 4] + lane_column() * 2;
}
DEVICE int swapped(int j) { return LANE_PIECES == 4 ? 16 * (j ^ (lane_id() & 2)) : 16 * j; }

// The lane's entry of a tile, to shared memory.
template <bool FP8> DEVICE void store_entry(const Raw& raw, u8* to) {
  u32 scales = expand_scales<FP8>(raw.scales);
#pragma unroll
  for (int j = 0; j < LANE_PIECES; j++) *(uint4*)(to + swapped(j)) = expand_piece<FP8>(raw, scales, j);
}

// Entries of a whole block: those that are late, or all for now.
DEVICE void store_entries(Shared& s, const Raw (&raw)[TILES_OF_WARP], int rank, bool late) {
#pragma unroll
  for (int i = 0; i < TILES_OF_WARP; i++) {
    if (late && !is_late(s.places[lane_entry(0, tile_of_warp(i))])) continue;
    u8* to = lane_pieces(s, 0, tile_of_warp(i));
    if (is_fp8(rank * BLOCK_TILES + tile_of_warp(i))) store_entry<true>(raw[i], to);
    else store_entry<false>(raw[i], to);
  }
}

// ---- first product ------------------------------------------------------------------------------------------------

// The lane's columns of q of heads l / 4 and l / 4 + 8: as loaded, then as the product takes them.
struct Query { u32 words[LANE_PIECES][4][2]; };

DEVICE void load_query(Query& q, const bf16* row_q) {
#pragma unroll
  for (int z = 0; z < 2; z++) {
    int head = lane_id() / 4 + 8 * z;
    const uint4* from = (const uint4*)(row_q + head * HEAD_DIM + lane_column());
#pragma unroll
    for (int j = 0; j < LANE_PIECES; j++) {
      uint4 w = head < HEADS ? load_l2(from + j) : make_uint4(0, 0, 0, 0);
      q.words[j][0][z] = w.x, q.words[j][1][z] = w.y, q.words[j][2][z] = w.z, q.words[j][3][z] = w.w;
    }
  }
}

// Turns the columns that turn, and brings the columns of a piece into the entries' order.
DEVICE void arrange_query(Query& q, const Shared& s) {
#pragma unroll
  for (int j = 0; j < LANE_PIECES; j++) {
    int pair = (lane_column() + 8 * j - TURNING) / 2;
    if (lane_column() + 8 * j >= TURNING) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 turn = s.turns[pair + i];
        q.words[j][i][0] = rotate_pair(q.words[j][i][0], turn.x, turn.y);
        q.words[j][i][1] = rotate_pair(q.words[j][i][1], turn.x, turn.y);
      }
    }
#pragma unroll
    for (int z = 0; z < 2; z++) {
      uint4 w = make_uint4(q.words[j][0][z], q.words[j][1][z], q.words[j][2][z], q.words[j][3][z]);
      q.words[j][0][z] = permute_bytes(w.x, w.z, 0x5410), q.words[j][1][z] = permute_bytes(w.x, w.z, 0x7632);
      q.words[j][2][z] = permute_bytes(w.y, w.w, 0x5410), q.words[j][3][z] = permute_bytes(w.y, w.w, 0x7632);
    }
  }
}

// The warp's part of the scores of a tile, over its columns. Of a whole block the lanes find the entries where they
// have put them (`store_entries`), else they put them there for the second product.
template <bool FP8> DEVICE void score_tile(float (&d)[2][4], const Query& q, const Raw& raw, u8* pieces) {
  u32 scales = WHOLE ? 0 : expand_scales<FP8>(raw.scales);
#pragma unroll
  for (int j = 0; j < LANE_PIECES; j++) {
    uint4 words = WHOLE ? *(const uint4*)(pieces + swapped(j)) : expand_piece<FP8>(raw, scales, j);
    if (!WHOLE) *(uint4*)(pieces + swapped(j)) = words;
    mma_bf16(d[0], q.words[j][0][0], q.words[j][0][1], q.words[j][1][0], q.words[j][1][1], words.x, words.y);
    mma_bf16(d[1], q.words[j][2][0], q.words[j][2][1], q.words[j][3][0], q.words[j][3][1], words.z, words.w);
  }
}

DEVICE void score(Shared& s, const Query& q, const Raw (&raw)[TILES_OF_WARP], int rank, int chunk) {
  int g = lane_id() / 4, quad = lane_id() % 4, k_warp = warp_id() % K_WARPS;
#pragma unroll
  for (int i = 0; i < TILES_OF_WARP; i++) {
    int own = tile_of_warp(i);
    u8* pieces = lane_pieces(s, chunk, own);
    float d[2][4] = {};  // two chains, for the products' latency
    if (!WHOLE && is_fp8(rank * BLOCK_TILES + chunk * TILES + own)) score_tile<true>(d, q, raw[i], pieces);
    else score_tile<false>(d, q, raw[i], pieces);
    *(float2*)&s.scores[k_warp][g][8 * own + 2 * quad] = make_float2(d[0][0] + d[1][0], d[0][1] + d[1][1]);
    *(float2*)&s.scores[k_warp][g + 8][8 * own + 2 * quad] = make_float2(d[0][2] + d[1][2], d[0][3] + d[1][3]);
  }
}

// ---- softmax ------------------------------------------------------------------------------------------------------

// Of the heads of a warp or half a warp: the maximum so far, and the lane's part of the sum.
struct Running { float highest[HEAD_ROUNDS], total[HEAD_ROUNDS]; };

// Halves of a warp have heads two apart: their scores lie in different banks.
DEVICE int softmax_head(int round) {
  int which = warp_id() + WARPS * round;
  return HEAD_LANES == 32 ? which : which / 2 * 4 + which % 2 + lane_id() / 16 * 2;
}
DEVICE bool has_heads(int round) {  // the same for the warp
  if (HEADS == 16 && HEADS_AT_ONCE * HEAD_ROUNDS == 16) return true;
  int which = warp_id() + WARPS * round;
  return HEAD_LANES == 32 ? which < HEADS : which < 8 && which / 2 * 4 + which % 2 < HEADS;
}
DEVICE float sum_of_head(float x) {
#pragma unroll
  for (int m = HEAD_LANES / 2; m; m >>= 1) x += shuffle_xor(x, m);
  return x;
}

// Probabilities of the chunk against the block's maximum so far; what they replace is scaled by `rescale`.
DEVICE void soften(Shared& s, Running& running, int chunk) {
  int own = lane_id() % HEAD_LANES;
#pragma unroll
  for (int round = 0; round < HEAD_ROUNDS; round++) {
    if (!has_heads(round)) continue;
    int head = softmax_head(round);
    float2 x[PAIRS_OF_LANE];
    float highest = running.highest[round];
#pragma unroll
    for (int n = 0; n < PAIRS_OF_LANE; n++) {
      int entry = 2 * (own + HEAD_LANES * n);
      x[n] = make_float2(never(), never());
      if (entry < ENTRIES) {
        x[n] = *(const float2*)&s.scores[0][head][entry];
#pragma unroll
        for (int k = 1; k < K_WARPS; k++) {
          float2 part = *(const float2*)&s.scores[k][head][entry];
          x[n].x += part.x, x[n].y += part.y;
        }
        int2 place = *(const int2*)&s.places[chunk * ENTRIES + entry];
        x[n].x = place.x < 0 ? never() : x[n].x * (SCALE / KEPT);
        x[n].y = place.y < 0 ? never() : x[n].y * (SCALE / KEPT);
      }
      highest = fmaxf(highest, fmaxf(x[n].x, x[n].y));
    }
#pragma unroll
    for (int m = HEAD_LANES / 2; m; m >>= 1) highest = fmaxf(highest, shuffle_xor(highest, m));
    float against = highest == never() ? 0.0f : highest, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < PAIRS_OF_LANE; n++) {
      float p0 = exp_fast(x[n].x - against), p1 = exp_fast(x[n].y - against);
      int entry = 2 * (own + HEAD_LANES * n);
      if (entry < ENTRIES) *(u32*)&s.probabilities[chunk % BUFFERS][head][entry] = f32x2_to_bf16x2(p0, p1);
      sum += p0 + p1;
    }
    float rescale = exp_fast(running.highest[round] - against);
    running.total[round] = running.total[round] * rescale + sum;
    running.highest[round] = highest;
    if (!WHOLE && own == 0) s.rescale[chunk % BUFFERS][head] = rescale;
  }
}

// ---- second product -----------------------------------------------------------------------------------------------

// d[t]: columns l % 4 and l % 4 + 4 of piece t of the warp's; head l / 4 in 0 and 1, head l / 4 + 8 in 2 and 3.
struct Output { float d[WARP_PIECES][4]; };

DEVICE void accumulate(const Shared& s, Output& o, int chunk) {
  int lane = lane_id();
  if (!WHOLE && chunk > 0) {
    float low = s.rescale[chunk % BUFFERS][lane / 4], high = s.rescale[chunk % BUFFERS][lane / 4 + 8];
    if (ballot(low != 1.0f || high != 1.0f)) {  // seldom behind the first chunks
#pragma unroll
      for (int t = 0; t < WARP_PIECES; t++) o.d[t][0] *= low, o.d[t][1] *= low, o.d[t][2] *= high, o.d[t][3] *= high;
    }
  }
  int swap = LANE_PIECES == 4 ? (warp_id() & 1) * 2 : 0;  // as `swapped`
  const bf16* p = &s.probabilities[chunk % BUFFERS][lane % 16][lane / 16 * 8];
  const u8* v = s.entries[chunk % BUFFERS][lane % 16] + (WARP_PIECES * warp_id() + lane / 16) * 16;
#pragma unroll
  for (int group = 0; group < ENTRIES / 16; group++) {
    u32 a[4];
    load_matrices(a, p + 16 * group);
#pragma unroll
    for (int t = 0; t < WARP_PIECES; t += 2) {
      u32 b[4];
      load_matrices_transposed(b, v + group * 16 * ENTRY_BYTES + 16 * (t ^ swap));
      mma_bf16(o.d[t], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_bf16(o.d[t + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// The outputs of the lane's heads, to the block that stores them.
DEVICE void send_output(Shared& s, const Output& o, int rank) {
  int quad = lane_id() % 4, to = warp_id() / SLICES, slice = warp_id() % SLICES;
  float highest[2] = {0.0f, 0.0f};
#pragma unroll
  for (int t = 0; t < WARP_PIECES; t++)
#pragma unroll
    for (int z = 0; z < 2; z++)
      highest[z] = fmaxf(highest[z], fmaxf(fabsf(o.d[t][2 * z]), fabsf(o.d[t][2 * z + 1])));
#pragma unroll
  for (int m = 1; m < 4; m <<= 1)
#pragma unroll
    for (int z = 0; z < 2; z++) highest[z] = fmaxf(highest[z], shuffle_xor(highest[z], m));
#pragma unroll
  for (int z = 0; z < 2; z++) {
    int head = lane_id() / 4 + 8 * z;
    if (head >= HEADS) continue;
    u32 exponent = max(as_bits(highest[z]) >> 23, 15u);  // 2^14 becomes the highest power of two that a value reaches
    float scale = as_float((268u - exponent) << 23);
    u32 words[WARP_PIECES];
#pragma unroll
    for (int t = 0; t < WARP_PIECES; t++) words[t] = f32x2_to_f16x2(o.d[t][2 * z] * scale, o.d[t][2 * z + 1] * scale);
    uint4* place = s.mail.outputs[rank][slice][head];
#pragma unroll
    for (int h = 0; h < WARP_PIECES / 4; h++)
      store_async(place + mail_piece(head, quad, h), to,
                  make_uint4(words[4 * h], words[4 * h + 1], words[4 * h + 2], words[4 * h + 3]), &s.outputs_are_here);
    if (quad == 0)
      store_async(&s.mail.scales[rank][slice][head], to, as_float(min(exponent + 50u, 254u) << 23),
                  &s.outputs_are_here);
  }
}

constexpr u32 HEADS_OF_GROUP = ALL_HEADS / OUT_GROUPS, PIECES = HEADS_OF_GROUP * HEAD_DIM / 8;  // of a tile of rows

// Columns quad and quad + 4 of a piece, quad = l % 4, are rotated back and stored; called by whole warps.
DEVICE void store_output(const Attend& p, const Shared& s, bool wanted, u32 row, u32 head, u32 column, float x,
                         float y) {
  u32 own = f32x2_to_bf16x2(x, y), other = shuffle_xor(own, 1), odd = threadIdx.x & 1u;
  // Odd lanes get both upper columns, even lanes both lower ones.
  u32 pair = odd ? permute_bytes(other, own, 0x7632) : permute_bytes(own, other, 0x5410);
  u32 first = (threadIdx.x & 3u) + 3u * odd;
  if (!wanted) return;
  if (column >= TURNING) {
    float2 turn = s.turns[(column - TURNING + first) / 2];
    pair = rotate_pair(pair, -turn.x, turn.y);
  }
  u32 piece = (head % HEADS_OF_GROUP * HEAD_DIM + column) / 8;
  u32 tile = head / HEADS_OF_GROUP * ((p.rows + 7u) / 8) + row / 8;
  *(u32*)(p.out + (u64)(tile * PIECES + piece) * 64 + row % 8 * 8 + first) = pair;
}

DEVICE float sink_part(float sink, float highest) { return sink == highest ? 1.0f : exp_fast(sink - highest); }

// ---- the kernel ---------------------------------------------------------------------------------------------------

// At most half of the registers: two blocks share a multiprocessor, or one block and the kernel before it.
KERNEL(attend, Attend, THREADS, 2) {
  Shared& s = *(Shared*)shared_memory();
  const int row = (int)(blockIdx.x / SPLIT / HEAD_GROUPS), first_head = (int)(blockIdx.x / SPLIT % HEAD_GROUPS) * HEADS;
  const int rank = (int)(blockIdx.x % SPLIT), thread = (int)threadIdx.x;
  // Dependents start behind the wait: then whatever the kernels in front of this one wrote is complete when they start,
  // and the boundary behind the output products may read its coefficients' sums early.
  auto wait = [&]() {
    wait_for_dependencies();
    if (threadIdx.x == 0) launch_dependents();
  };
  bool waited = p.early == 0;
  const bf16* row_q = p.q + ((i64)row * ALL_HEADS + first_head) * HEAD_DIM;
  Query q;
  if (waited) {
    wait();
    load_query(q, row_q);
  }
  // Everything that needs only the row is on its way first.
  const int slot = load_l2(p.row_slot + row), position = load_l2(p.row_position + row);
  const int begin = rank * BLOCK_TILES * 8;
  bool choice_is_late = OTHERS && !BLOCK && !waited && p.early < 2;
  auto load_choice = [&](int i) {
    return i < BLOCK_TILES * 8 && begin + i < p.topk ? load_l2(p.chosen + (i64)row * p.topk + begin + i) : -1;
  };
  int choice = OTHERS && !BLOCK && !choice_is_late ? load_choice(thread) : -1;
  if (slot < 0) {
    if (!waited) wait();
    constexpr u32 OWN = COLUMNS / 8;
    for (u32 i = threadIdx.x; i < HEADS * OWN; i += THREADS) {
      u32 head = first_head + i / OWN, tile = head / HEADS_OF_GROUP * ((p.rows + 7) / 8) + row / 8;
      u32 piece = head % HEADS_OF_GROUP * (HEAD_DIM / 8) + rank * OWN + i % OWN;
      *(uint4*)(p.out + ((u64)tile * PIECES + piece) * 64 + row % 8 * 8) = make_uint4(0, 0, 0, 0);
    }
    return;  // all blocks of the cluster
  }

  // Places of the entries.
  Visible v;
  const int last = BLOCK ? load_l2(p.row_last + row) : position;
  v.first = max(0, last - WINDOW + 1);
  v.count = max(0, last + 1 - v.first);
  v.complete = waited ? 0x7FFFFFFF : last + 1 - p.fresh;
  v.others = BLOCK ? BLOCK : p.topk;
  if (!BLOCK && !waited && (rank + 1) * BLOCK_TILES > OTHER_TILES) {
    // The rows of a request are consecutive: how many stand in front of this one.
    int before = 0;
    for (u32 other = 0; !other; before += other ? lowest_bit(other) : 32) {
      int index = row - 1 - before - lane_id();
      other = ballot(index < 0 || load_l2(p.row_slot + max(index, 0)) != slot);
    }
    v.complete = position - before;
  }
  auto find_places = [&](bool chosen_only) {
#pragma unroll 1
    for (int i = thread; i < PLACES; i += THREADS) {
      int which = begin + i, place = -1;
      if (i >= BLOCK_TILES * 8 || which >= ROW_TILES * 8) {
        // behind the block's or the row's entries
      } else if (which >= OTHER_TILES * 8) {
        if (chosen_only) continue;
        which -= OTHER_TILES * 8;
        int at = v.first + which;
        if (which < v.count) place = slot * p.ring + at - (int)multiply_high((u32)at, p.ring_inverse) * p.ring;
        if (WHOLE && which < v.count && at >= v.complete) place |= LATE;
      } else if (BLOCK) {
        if (which < v.others) place = (row - row % (BLOCK ? BLOCK : 1) + which) | (!WHOLE || waited ? 0 : LATE);
      } else if (which < v.others && (which + 1) * p.ratio <= position + 1 && (chosen_only || !choice_is_late)) {
        int entry = i == thread ? choice : load_choice(i);
        if (entry >= 0) {
          int page = (int)multiply_high((u32)entry, p.page_inverse), within = entry - page * p.entries_per_page;
          place = load_l2(p.page_table + (i64)slot * p.pages_per_slot + page) * p.entries_per_page + within;
          if (WHOLE && chosen_only) place |= LATE;
        }
      }
      s.places[i] = place;
      const bool fp8 = is_fp8((begin + i) / 8), own = BLOCK && begin + i < OTHER_TILES * 8;
      const i64 at = place < 0 ? 0 : place & (LATE - 1);
      s.sources[i].codes = !fp8 ? p.entry_codes + at * (HEAD_DIM / 2)
                                : (own ? p.own_codes : p.window_codes) + at * HEAD_DIM;
      s.sources[i].scales = !fp8 ? p.entry_scales + at * (HEAD_DIM / 16)
                                 : (own ? p.own_scales : p.window_scales) + at * (HEAD_DIM / 32);
    }
  };
  find_places(false);
  if (SPLIT > 1 && thread == THREADS / 2) {
    barrier_init(&s.softmax_is_here, 1);
    barrier_init(&s.outputs_are_here, 1);
    barrier_init_fence();
    barrier_expect(&s.softmax_is_here, SPLIT * HEADS * 8);
    barrier_expect(&s.outputs_are_here, SPLIT * HEADS * SLICES * (2 * WARP_COLUMNS + 4));
  }
  for (int i = THREADS - 1 - thread; i < ROPE / 2; i += THREADS)  // by the last warp: the first ones find places
    sincos_of((float)position * p.frequencies[i], s.turns[i].x, s.turns[i].y);
  if (thread < HEADS) s.sink[thread] = p.sink[first_head + thread];
  sync_block();

  Raw raw[TILES_OF_WARP] = {};
  // Of a part that comes in chunks, the first one may be on its way if all of it was chosen before.
  const bool chosen_before = !waited && OTHERS && !BLOCK && !choice_is_late;
  const bool ahead = WHOLE || (chosen_before && rank * BLOCK_TILES + TILES <= OTHER_TILES);
  if (ahead) load_entries(raw, s, rank, 0, false);
  if (WHOLE) store_entries(s, raw, rank, false);
  if (!waited) {
    if (choice_is_late) sync_block();  // all have read the places that are found again
    wait();
    load_query(q, row_q);
    if (choice_is_late) {
      choice = load_choice(thread);
      find_places(true);
      sync_block();
    }
    if (WHOLE) {
      load_entries(raw, s, rank, 0, true);
      store_entries(s, raw, rank, true);
    }
  }
  if (!ahead) load_entries(raw, s, rank, 0, false);
  arrange_query(q, s);

  Output o;
#pragma unroll
  for (int t = 0; t < WARP_PIECES; t++) o.d[t][0] = o.d[t][1] = o.d[t][2] = o.d[t][3] = 0.0f;
  Running running;
#pragma unroll
  for (int round = 0; round < HEAD_ROUNDS; round++) running.highest[round] = never(), running.total[round] = 0.0f;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    score(s, q, raw, rank, chunk);
    if (chunk + 1 < CHUNKS) load_entries(raw, s, rank, chunk + 1, false);  // on their way till the next turn
    sync_block();
    if (!WHOLE && chunk > 0) accumulate(s, o, chunk - 1);
    soften(s, running, chunk);
    // Scores are read for the last time: from here on other blocks may put their outputs in their place.
    if (SPLIT > 1 && chunk == CHUNKS - 1) cluster_arrive_relaxed();
    sync_block();
    if (WHOLE) break;  // told to the compiler: nothing lives from one chunk to the next
  }
  accumulate(s, o, CHUNKS - 1);

  if (SPLIT > 1) cluster_wait();
#pragma unroll
  for (int round = 0; round < HEAD_ROUNDS; round++) {
    if (!has_heads(round)) continue;
    int head = softmax_head(round), to = lane_id() % HEAD_LANES;
    float2 value = make_float2(running.highest[round], sum_of_head(running.total[round]));
    if (head >= HEADS) continue;
    if (SPLIT == 1 && to == 0) s.softmax[head] = value;
    if (SPLIT > 1 && to < SPLIT) store_async(&s.mail.softmax[rank][head], to, value, &s.softmax_is_here);
  }
  if (SPLIT > 1) send_output(s, o, rank);
  if constexpr (SPLIT == 1) {
    sync_block();
#pragma unroll
    for (int z = 0; z < 2; z++) {
      int head = lane_id() / 4 + 8 * z;
      bool wanted = head < HEADS;
      float2 own = wanted ? s.softmax[head] : make_float2(0.0f, 0.0f);
      float sink = wanted ? s.sink[head] : 0.0f, highest = fmaxf(own.x, sink);
      float factor = exp_fast(own.x - highest);
      factor *= (1.0f / KEPT) / (own.y * factor + sink_part(sink, highest));
      if (highest == never()) factor = 0.0f;  // neither an entry nor a sink
#pragma unroll
      for (int t = 0; t < WARP_PIECES; t++) {
        int column = WARP_COLUMNS * warp_id() + 8 * t;
        store_output(p, s, wanted, row, first_head + head, column, o.d[t][2 * z] * factor, o.d[t][2 * z + 1] * factor);
      }
    }
  } else {
    barrier_wait(&s.softmax_is_here, 0);
    constexpr u32 ITEMS = HEADS * COLUMNS / 4;
    for (u32 i = threadIdx.x & ~31u; i < ITEMS; i += THREADS) {
      u32 item = min(i + (threadIdx.x & 31u), ITEMS - 1), quad = threadIdx.x & 3u;
      bool wanted = ITEMS % 32 == 0 || i + (threadIdx.x & 31u) == item;
      u32 pieces = item / 4 % (WARP_PIECES / 2), head = item / (2 * WARP_PIECES) % HEADS;
      u32 slice = item / (2 * WARP_PIECES) / HEADS;
      float highest = s.sink[head], total = 0.0f, factor[SPLIT];
#pragma unroll
      for (int r = 0; r < SPLIT; r++) highest = fmaxf(highest, s.mail.softmax[r][head].x);
      float against = highest == never() ? 0.0f : highest;
#pragma unroll
      for (int r = 0; r < SPLIT; r++) {
        factor[r] = exp_fast(s.mail.softmax[r][head].x - against);
        total += s.mail.softmax[r][head].y * factor[r];
      }
      float inverse = highest == never() ? 0.0f : 1.0f / (total + sink_part(s.sink[head], highest));
      if (i < THREADS) barrier_wait(&s.outputs_are_here, 0);
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int r = 0; r < SPLIT; r++) {
        const uint4* place = &s.mail.outputs[r][slice][head][mail_piece(head, quad, pieces / 2)];
        uint2 part = ((const uint2*)place)[pieces % 2];
        float by = factor[r] * s.mail.scales[r][slice][head];
        x[0] += as_float(f16x2_to_f32_low(part.x)) * by, x[1] += as_float(f16x2_to_f32_high(part.x)) * by;
        x[2] += as_float(f16x2_to_f32_low(part.y)) * by, x[3] += as_float(f16x2_to_f32_high(part.y)) * by;
      }
      u32 column = rank * COLUMNS + slice * WARP_COLUMNS + pieces * 16;
      store_output(p, s, wanted, row, first_head + head, column, x[0] * inverse, x[1] * inverse);
      store_output(p, s, wanted, row, first_head + head, column + 8, x[2] * inverse, x[3] * inverse);
    }
  }
}
