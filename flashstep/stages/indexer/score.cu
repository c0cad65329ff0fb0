// Scores of index keys (section 7), for one wave of the plan: the sum over heads of relu(query . key) * weight.
//
// A block takes a part of the tiles of keys. It rotates and quantizes the queries of their rows itself, in shared
// memory: that is as much to read as operands that a kernel in front would have prepared.
//
// The products are bf16 ones of exact operands: an e2m1 value times its power-of-two scale fits bf16, and the sum over
// columns is exact in float32 unless the scales of a key lie very far apart. Equal keys give equal scores wherever they
// stand, because every entry goes through the same operations in the same order.
//
// The operands' columns are permuted to how keys are stored: lane 4 r + q holds a quarter of key r, 4 WORDS bytes in
// one piece, and takes columns i and i + 4 of a word of 8 as a pair: two shifts and a multiply decode it.
#include "choose.cuh"

// Constants: HEADS, INDEX_HEAD_DIM, ROPE_DIMS, WEIGHT_SCALE, ENTRIES_PER_PAGE, WARPS.
constexpr int THREADS = WARPS * 32;
constexpr int COLUMN_TILES = (HEADS + 7) / 8;      // of 8 heads; padding weighs nothing
constexpr int WORDS = INDEX_HEAD_DIM / 32;         // of 8 columns that a lane holds of a key, and of a head
constexpr int SCALES = INDEX_HEAD_DIM / 32;        // of a key
constexpr int QUERY_PIECES = COLUMN_TILES * WORDS * 32;  // of 16 bytes, of a row's queries
constexpr int QUERY_GAIN = 64, KEY_GAIN = -64;     // exponents: neither operand leaves bf16
constexpr int UNROLL = ROLE == SOURCE ? 1 : 2;     // tiles of heads: more would spill
static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a lane's part of a key is one load");

struct Shared {
  alignas(128) uint4 queries[GROUP_ROWS * QUERY_PIECES];
  float weights[GROUP_ROWS * COLUMN_TILES * 8];
  float2 turns[GROUP_ROWS * ROPE_DIMS / 2];  // cosine and sine
  Plan plan;                                 // here rather than in registers, which the operands fill
  int wave_begin, wave_end;
};

// ---- queries ------------------------------------------------------------------------------------------------------

// The operand of 8 columns of a head: their fp4 round trip as bf16 times 2^QUERY_GAIN, in pairs (i, i + 4) as the keys
// are decoded. Four neighbouring lanes hold the group of 32 columns that shares a scale.
DEVICE uint4 quantize(const float (&x)[8]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) amax = fmaxf(amax, fabsf(x[i]));
  amax = fmaxf(amax, shuffle_xor(amax, 1));
  amax = fmaxf(amax, shuffle_xor(amax, 2));
  u32 code = fp4_scale_code(amax);
  float inverse = ue8m0_inverse(code), scale = ue8m0_to_f32(min(code + QUERY_GAIN, 254u));
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    pairs[i] = f32x2_to_bf16x2(e2m1_to_f32(f32_to_e2m1(x[i] * inverse)) * scale,
                               e2m1_to_f32(f32_to_e2m1(x[i + 4] * inverse)) * scale);
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The angles of the group's rows.
DEVICE void find_turns(const Score& p, Shared& s, const Group& group) {
  for (int i = threadIdx.x; i < group.rows * (ROPE_DIMS / 2); i += THREADS) {
    float sine, cosine;
    int position = s.plan.position[group.first + i / (ROPE_DIMS / 2)];
    sincos_accurate((float)position * p.frequencies[i % (ROPE_DIMS / 2)], &sine, &cosine);
    s.turns[i] = make_float2(cosine, sine);
  }
}

// Queries of the group as operands of the product, and the weights of their heads.
DEVICE void prepare_queries(const Score& p, Shared& s, const Group& group) {
  for (int i = threadIdx.x; i < group.rows * QUERY_PIECES; i += THREADS) {  // whole warps
    int row = i / QUERY_PIECES, piece = i % QUERY_PIECES;
    int head = piece / (INDEX_HEAD_DIM / 8), column = piece % (INDEX_HEAD_DIM / 8) * 8;
    float x[8] = {};
    if (head < HEADS) {
      const bf16* query = p.query + (i64)(group.first + row) * p.query_stride + p.query_column;
      uint4 v = load_l2((const uint4*)(query + head * INDEX_HEAD_DIM + column));
      u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float a = bf16x2_low(words[j]), b = bf16x2_high(words[j]);
        int rotary = column / 2 + j - (INDEX_HEAD_DIM - ROPE_DIMS) / 2;
        if (rotary >= 0) {
          float2 t = s.turns[row * (ROPE_DIMS / 2) + rotary];
          float turned = round_bf16(a * t.x - b * t.y);
          b = round_bf16(a * t.y + b * t.x);
          a = turned;
        }
        x[2 * j] = a;
        x[2 * j + 1] = b;
      }
    }
    // Lane 4 (head % 8) + q of the product holds columns q INDEX_HEAD_DIM / 4 + 8 word + 0..7.
    int q = column / (INDEX_HEAD_DIM / 4), word = column / 8 % WORDS, lane = head % 8 * 4 + q;
    s.queries[row * QUERY_PIECES + (head / 8 * WORDS + word) * 32 + lane] = quantize(x);
  }
  for (int i = threadIdx.x; i < group.rows * COLUMN_TILES * 8; i += THREADS) {
    int row = i / (COLUMN_TILES * 8), head = i % (COLUMN_TILES * 8);
    const float* weights = p.weights + (i64)(group.first + row) * p.weights_stride + p.weights_column;
    s.weights[i] = round_bf16(head < HEADS ? load_l2(weights + head) : 0.0f) * WEIGHT_SCALE;
  }
}

// ---- keys ---------------------------------------------------------------------------------------------------------

// What a lane needs of the 4 x 8 entries of a tile: a quarter of one key of each 8.
struct Keys {
  u32 words[4][WORDS];
  u32 scales;  // a byte each
};

// Entries beyond the group's last one repeat that one: what lies behind it was perhaps never written.
DEVICE void fetch(Keys& keys, const Score& p, const Group& group, int tile) {
  int lane = lane_id();
  keys.scales = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int number = min(tile * TILE + i * 8 + lane / 4, group.extent - 1), entry = number;
    if (ROLE == CONSUMER) entry = candidate_entry(p.candidates, group.first, number);
    i64 page = load_l2(p.page_table + (i64)group.slot * p.pages_per_slot + (u32)entry / ENTRIES_PER_PAGE);
    i64 place = page * ENTRIES_PER_PAGE + (u32)entry % ENTRIES_PER_PAGE;
    const u32* codes = (const u32*)(p.key_codes + place * (INDEX_HEAD_DIM / 2)) + lane % 4 * WORDS;
    if constexpr (WORDS == 4) {
      uint4 v = load_l2((const uint4*)codes);
      keys.words[i][0] = v.x; keys.words[i][1] = v.y; keys.words[i][2] = v.z; keys.words[i][3] = v.w;
    } else if constexpr (WORDS == 2) {
      uint2 v = load_l2((const uint2*)codes);
      keys.words[i][0] = v.x; keys.words[i][1] = v.y;
    } else {
      keys.words[i][0] = load_l2(codes);
    }
    i64 scale = place * SCALES + lane % 4 * SCALES / 4;
    keys.scales |= (load_l2((const u32*)p.key_scales + scale / 4) >> (int)(scale % 4 * 8) & 255u) << 8 * i;
  }
}

// Columns I and I + 4 of a word as bf16: exponent and mantissa where bf16 has them, then the scale and the difference
// of the biases in one product.
template <int I> DEVICE u32 decode(u32 word, u32 scale) {
  u32 value = I == 0 ? word << 6 : I == 1 ? word << 2 : I == 2 ? word >> 2 : word >> 6;
  u32 sign = I == 0 ? word << 12 : I == 1 ? word << 8 : I == 2 ? word << 4 : word;
  return multiply_bf16x2((value & 0x01C001C0u) | (sign & 0x80008000u), scale);
}

// Both halves: 2^(code - 127 + KEY_GAIN + 126).
DEVICE u32 key_scale(u32 code) { return min(code + (u32)(126 + KEY_GAIN), 254u) * 0x00800080u; }

// Unsigned order of the result = order of the scores; 0 is below every score.
DEVICE u32 order_key(float score) {
  u32 bits = as_bits(score == 0.0f ? 0.0f : score);  // -0 equals 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The keys as the product's first operand: halves of 16 entries, steps of 16 columns.
DEVICE void decode_tile(u32 (&a)[2][2 * WORDS][4], const Keys& keys) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 low = key_scale(keys.scales >> 16 * half & 255u), high = key_scale(keys.scales >> (16 * half + 8) & 255u);
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      u32 v = keys.words[2 * half][j], w = keys.words[2 * half + 1][j];
      a[half][2 * j][0] = decode<0>(v, low);
      a[half][2 * j][1] = decode<0>(w, high);
      a[half][2 * j][2] = decode<1>(v, low);
      a[half][2 * j][3] = decode<1>(w, high);
      a[half][2 * j + 1][0] = decode<2>(v, low);
      a[half][2 * j + 1][1] = decode<2>(w, high);
      a[half][2 * j + 1][2] = decode<3>(v, low);
      a[half][2 * j + 1][3] = decode<3>(w, high);
    }
  }
}

// ---- scores -------------------------------------------------------------------------------------------------------

// Of rows `first_row`, `first_row` + `step`, ... of the group.
DEVICE void score_tile(const Score& p, const Shared& s, const Group& group, const u32 (&a)[2][2 * WORDS][4], int tile,
                       int first_row, int step) {
  int lane = lane_id(), q = lane % 4, stride = stride_of(group);
  for (int r = first_row; r < group.rows; r += step) {
    float sum[4] = {};  // of this lane's heads, for entries lane / 4 + 8 i
#pragma unroll UNROLL
    for (int n = 0; n < COLUMN_TILES; n++) {
      float d[2][4] = {};
#pragma unroll
      for (int j = 0; j < WORDS; j++) {
        uint4 b = s.queries[r * QUERY_PIECES + (n * WORDS + j) * 32 + lane];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32(&first)[4] = a[half][2 * j];
          const u32(&second)[4] = a[half][2 * j + 1];
          mma_bf16(d[half], first[0], first[1], first[2], first[3], b.x, b.y);
          mma_bf16(d[half], second[0], second[1], second[2], second[3], b.z, b.w);
        }
      }
      float2 w = *(const float2*)&s.weights[(r * COLUMN_TILES + n) * 8 + 2 * q];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum[i] = fmaf(fmaxf(d[i / 2][i % 2 * 2], 0.0f), w.x, sum[i]);
        sum[i] = fmaf(fmaxf(d[i / 2][i % 2 * 2 + 1], 0.0f), w.y, sum[i]);
      }
    }
    // Sum over the four lanes of an entry so that lane q ends with entry lane / 4 + 8 q.
    bool odd = q & 1, upper = q & 2;
    float low = (odd ? sum[1] : sum[0]) + shuffle_xor(odd ? sum[0] : sum[1], 1);
    float high = (odd ? sum[3] : sum[2]) + shuffle_xor(odd ? sum[2] : sum[3], 1);
    float total = (upper ? high : low) + shuffle_xor(upper ? low : high, 2);
    int number = tile * TILE + q * 8 + lane / 4, at = group.offset + r * stride + number;
    u32 key = order_key(total);
    p.keys[at] = key;
    if (ROLE == SOURCE) {
      u32 best = key;  // of entries not visible to the row, too: the newest block, where those are, is always in
#pragma unroll
      for (int m = 4; m < 4 * BLOCK_ENTRIES; m <<= 1) best = max(best, shuffle_xor(best, m));
      if (lane / 4 % BLOCK_ENTRIES == 0) p.block_keys[at / BLOCK_ENTRIES] = best;
    }
  }
}

// What the block has of a group: tiles [first, last), and how `share` warps each divide the rows of one among them.
struct Part { int first, last, share; };

DEVICE Part part_of(const Group& group, int begin, int end) {
  int cost = group.rows + DECODE_COST;
  Part part = {max((begin - group.cost + cost - 1) / cost, 0), 0, 1};
  part.last = min((end - group.cost + cost - 1) / cost, tiles_of(group));
  while (part.share < min(WARPS, group.rows) && (part.last - part.first) * part.share < WARPS) part.share *= 2;
  return part;
}
DEVICE int first_tile(const Part& part) { return part.first + warp_id() / part.share; }

// Keys that were complete before the forward may be on their way already: then `fetched`.
DEVICE void score_part(const Score& p, Shared& s, const Group& group, const Part& part, Keys& keys, bool fetched) {
  prepare_queries(p, s, group);
  int step = WARPS / part.share, tile = first_tile(part);
  if (tile < part.last && !fetched) fetch(keys, p, group, tile);
  sync_block();
  for (; tile < part.last; tile += step) {
    u32 a[2][2 * WORDS][4];
    decode_tile(a, keys);
    if (tile + step < part.last) fetch(keys, p, group, tile + step);
    score_tile(p, s, group, a, tile, warp_id() % part.share, part.share);
  }
}

KERNEL(score, Score, THREADS, WARPS > 8 ? 1 : 2) {
  launch_dependents();
  Shared& s = *(Shared*)shared_memory();
  if (!p.early) wait_for_dependencies();
  if (threadIdx.x == 0) s.wave_begin = s.wave_end = 0;
  make_plan<THREADS>(s.plan, p.rows, p.row_position, p.row_slot, p.wave_keys);
  sync_block();
  const Group* groups = s.plan.groups;
  int count = s.plan.count;
  for (int g = threadIdx.x; g < count; g += THREADS) {
    if (groups[g].wave != p.wave) continue;
    if (g == 0 || groups[g - 1].wave < p.wave) s.wave_begin = groups[g].cost;
    if (g == count - 1) s.wave_end = s.plan.cost;
    else if (groups[g + 1].wave > p.wave) s.wave_end = groups[g + 1].cost;
  }
  sync_block();
  i64 span = s.wave_end - s.wave_begin;
  int begin = s.wave_begin + (int)(span * (int)blockIdx.x / (int)gridDim.x);
  int end = s.wave_begin + (int)(span * ((int)blockIdx.x + 1) / (int)gridDim.x);
  int low = 0, high = count;  // the last group whose cost begins at or before `begin`
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (groups[middle].cost <= begin) low = middle;
    else high = middle;
  }
  Keys keys;
  bool waited = !p.early;
  for (int g = low; g < count && groups[g].cost < end; g++) {
    Part part = part_of(groups[g], begin, end);
    if (part.first >= part.last) continue;
    if (waited) sync_block();  // all have left the previous group
    find_turns(p, s, groups[g]);
    bool fetched = !waited && first_tile(part) < part.last && (first_tile(part) + 1) * TILE <= groups[g].old;
    if (fetched) fetch(keys, p, groups[g], first_tile(part));
    if (!waited) wait_for_dependencies();
    waited = true;
    sync_block();
    score_part(p, s, groups[g], part, keys, fetched);
  }
  if (!waited) wait_for_dependencies();
}
