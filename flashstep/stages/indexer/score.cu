// Scores of index keys (section 7), for one wave of the plan: the sum over heads of relu(query . key) * weight.
//
// The products are bf16 ones of exact operands: an e2m1 value times its power-of-two scale fits bf16, and the sum over
// columns is exact in float32 unless the scales of a key lie very far apart. Equal keys give equal scores wherever they
// stand, because every entry goes through the same operations in the same order.
//
// The operands' columns are permuted to how keys are stored: lane 4 r + q holds a quarter of key r, 4 WORDS bytes in
// one piece, and takes columns i and i + 4 of a word of 8 as a pair: two shifts and a multiply decode it.
#include "choose.cuh"

// Constants: HEADS, INDEX_HEAD_DIM, ENTRIES_PER_PAGE, WARPS.
constexpr int COLUMN_TILES = (HEADS + 7) / 8;      // of 8 heads
constexpr int WORDS = INDEX_HEAD_DIM / 32;         // of 8 columns that a lane holds of a key
constexpr int SCALES = INDEX_HEAD_DIM / 32;        // of a key
constexpr int QUERY_PIECES = COLUMN_TILES * WORDS * 32;  // of 16 bytes, of a row's queries
constexpr int KEY_GAIN = -64;                      // exponent; query.cu gives queries the opposite one
constexpr int MAX_ROWS = 512;
static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a lane's part of a key is one load");

struct Shared {
  alignas(128) uint4 queries[GROUP_ROWS * QUERY_PIECES];
  float weights[GROUP_ROWS * COLUMN_TILES * 8];
  Group groups[MAX_ROWS];  // here rather than in registers, which the operands fill
  int wave_begin, wave_end;
};

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

DEVICE void score_tile(const Score& p, const Shared& s, const Group& group, const u32 (&a)[2][2 * WORDS][4], int tile) {
  int lane = lane_id(), q = lane % 4;
  for (int r = 0; r < group.rows; r++) {
    float sum[4] = {};  // of this lane's heads, for entries lane / 4 + 8 i
#pragma unroll 2  // all four would spill
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
    int number = tile * TILE + q * 8 + lane / 4, at = group.offset + r * group.stride + number;
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

// Tiles of `group` whose cost begins in [begin, end) belong to the block; queries come to shared memory, then a warp
// takes every WARPS-th of them, the next one's keys on their way.
DEVICE void score_group(const Score& p, Shared& s, const Group& group, int begin, int end) {
  int cost = group.rows + DECODE_COST, tiles = group.stride / TILE, warp = warp_id();
  int first = max((begin - group.cost + cost - 1) / cost, 0), last = min((end - group.cost + cost - 1) / cost, tiles);
  if (first >= last) return;
  sync_block();  // all have left the previous group
  const uint4* queries = (const uint4*)p.operands + (i64)group.first * QUERY_PIECES;
  for (int i = threadIdx.x; i < group.rows * QUERY_PIECES; i += WARPS * 32) cp_async16(&s.queries[i], queries + i);
  cp_async_commit();
  for (int i = threadIdx.x; i < group.rows * COLUMN_TILES * 8; i += WARPS * 32)
    s.weights[i] = load_l2(p.head_weights + group.first * (COLUMN_TILES * 8) + i);
  Keys keys;
  int tile = first + warp;
  if (tile < last) fetch(keys, p, group, tile);
  cp_async_wait<0>();
  sync_block();
  for (; tile < last; tile += WARPS) {
    u32 a[2][2 * WORDS][4];
    decode_tile(a, keys);
    if (tile + WARPS < last) fetch(keys, p, group, tile + WARPS);
    score_tile(p, s, group, a, tile);
  }
}

KERNEL(score, Score, WARPS * 32, 1) {
  launch_dependents();
  Shared& s = *(Shared*)shared_memory();
  wait_for_dependencies();
  // All that may be groups, without waiting for their number.
  int4 header = load_l2((const int4*)p.plan);
  const int4* plan = (const int4*)(p.plan + sizeof(Header) / 4);
  for (int i = threadIdx.x; i < 2 * p.rows; i += WARPS * 32) ((int4*)s.groups)[i] = load_l2(plan + i);
  int groups = header.x;
  if (groups == 0) return;
  if (threadIdx.x == 0) s.wave_begin = s.wave_end = 0;
  sync_block();
  for (int g = threadIdx.x; g < groups; g += WARPS * 32) {
    if (s.groups[g].wave != p.wave) continue;
    if (g == 0 || s.groups[g - 1].wave < p.wave) s.wave_begin = s.groups[g].cost;
    if (g == groups - 1) s.wave_end = header.y;
    else if (s.groups[g + 1].wave > p.wave) s.wave_end = s.groups[g + 1].cost;
  }
  sync_block();
  i64 span = s.wave_end - s.wave_begin;
  int begin = s.wave_begin + (int)(span * (int)blockIdx.x / (int)gridDim.x);
  int end = s.wave_begin + (int)(span * ((int)blockIdx.x + 1) / (int)gridDim.x);
  int low = 0, high = groups;  // the last group whose cost begins at or before `begin`
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (s.groups[middle].cost <= begin) low = middle;
    else high = middle;
  }
  for (int g = low; g < groups && s.groups[g].cost < end; g++) score_group(p, s, s.groups[g], begin, end);
}
