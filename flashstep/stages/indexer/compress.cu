// Compressor of a KV source (section 6): what the rows of a forward add to the raw ring, the compressed cache and the
// index keys.
//
// A block takes eight rows, two warps each, so that the index keys of all eight are one product per piece of wk. wk
// comes into shared memory before the wait for the kernel in front: it is most of what this kernel reads. In registers
// it would keep the block from starting beside others.
#include "common.cuh"

// Constants: HEAD_DIM, INDEX_HEAD_DIM, ROPE_DIMS, RATIO, ENTRIES_PER_PAGE, RMS_EPS.
static_assert(HEAD_DIM % 64 == 0 && INDEX_HEAD_DIM % 32 == 0 && INDEX_HEAD_DIM <= 128, "");
static_assert(ROPE_DIMS % 2 == 0 && ROPE_DIMS <= INDEX_HEAD_DIM && ROPE_DIMS <= HEAD_DIM, "");
constexpr int ROWS = 8, WARPS = 16;              // warps r and r + 8 have a half of row r's columns each
constexpr int PARTS = RATIO == 1 ? 1 : 2;        // what a token gives: its latent, or k and z
constexpr int HALF_PAIRS = HEAD_DIM / 4;         // adjacent pairs of columns in a half
constexpr int PAIRS = (HALF_PAIRS + 31) / 32;    // of a lane: lane, lane + 32, ... of its half
constexpr int KEY_PAIRS = (INDEX_HEAD_DIM + 63) / 64;
constexpr int STEPS = HEAD_DIM / 32;             // of the product's sum, in a half
constexpr int TILES = INDEX_HEAD_DIM / 16;       // of the product's outputs: warps t and t + 8 have a half of K each
constexpr u32 WK_BYTES = TILES * 2 * STEPS * 512;
constexpr u32 COPY_BYTES = 16384;

struct Shared {
  alignas(128) uint4 wk[TILES][2][STEPS][32];    // units as common.cuh describes them
  u32 latent[ROWS][HEAD_DIM / 2 + 4];            // bf16 pairs; the padding spreads a column's rows over the banks
  float key[2][ROWS][INDEX_HEAD_DIM];
  float2 turns[ROWS][ROPE_DIMS / 2];             // cosine and sine at the rows' entries
  float squares[2][ROWS];
  alignas(8) u64 ready;
};

DEVICE int half() { return warp_id() / ROWS; }
DEVICE bool has_pair(int j) { return HALF_PAIRS % 32 == 0 || lane_id() + 32 * j < HALF_PAIRS; }
DEVICE int pair_of_lane(int j) { return half() * HALF_PAIRS + lane_id() + 32 * j; }

DEVICE float2 turn(float2 v, float2 t) {
  return make_float2(round_bf16(v.x * t.x - v.y * t.y), round_bf16(v.x * t.y + v.y * t.x));
}

// The raw values of the position `back` before the row's: of this forward if it has that row, else the ring's.
DEVICE const float2* raw_values(const Compress& p, int row, int back, int slot, int position) {
  int other = row - back;
  if (other >= 0 && load_l2(p.row_slot + other) == slot)
    return (const float2*)(p.raw + (i64)other * p.raw_stride + p.raw_column);
  return (const float2*)(p.ring + ((i64)slot * p.ring_length + (position - back) % p.ring_length) * (PARTS * HEAD_DIM));
}

// Pools the group that the row closes, whose own values are `own`: pooled[j] is the lane's j-th pair, rounded to bf16.
// A softmax over the group's tokens, per channel, with running maximum and sum.
DEVICE void pool(float2 (&pooled)[PAIRS], const float2 (&own)[PARTS * PAIRS], const Compress& p, int row, int slot,
                 int position) {
  float2 top[PAIRS], weight[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    pooled[j] = own[j];
    top[j] = own[(PARTS - 1) * PAIRS + j];
    weight[j] = make_float2(1.0f, 1.0f);
  }
#pragma unroll
  for (int back = 1; back < RATIO; back++) {
    const float2* values = raw_values(p, row, back, slot, position);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      if (!has_pair(j)) continue;
      float2 k = load_l2(values + pair_of_lane(j)), z = load_l2(values + HEAD_DIM / 2 + pair_of_lane(j)), old = top[j];
      top[j] = make_float2(fmaxf(old.x, z.x), fmaxf(old.y, z.y));
      float2 keep = make_float2(exp_accurate(old.x - top[j].x), exp_accurate(old.y - top[j].y));
      float2 add = make_float2(exp_accurate(z.x - top[j].x), exp_accurate(z.y - top[j].y));
      pooled[j] = make_float2(pooled[j].x * keep.x + k.x * add.x, pooled[j].y * keep.y + k.y * add.y);
      weight[j] = make_float2(weight[j].x * keep.x + add.x, weight[j].y * keep.y + add.y);
    }
  }
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
    pooled[j] = make_float2(round_bf16(pooled[j].x / weight[j].x), round_bf16(pooled[j].y / weight[j].y));
}

// RMS norm (section 4), rounded to bf16, of pairs whose sum of squares over `columns` columns is `sum`.
template <int N> DEVICE void normalize(float2 (&pairs)[N], const u32 (&weight)[N], float sum, int columns) {
  float inverse = 1.0f / sqrtf(sum / (float)columns + RMS_EPS);
#pragma unroll
  for (int j = 0; j < N; j++) {
    float low = bf16x2_low(weight[j]) * pairs[j].x * inverse, high = bf16x2_high(weight[j]) * pairs[j].y * inverse;
    pairs[j] = make_float2(round_bf16(low), round_bf16(high));
  }
}
template <int N> DEVICE float sum_squares(const float2 (&pairs)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < N; j++) sum += pairs[j].x * pairs[j].x + pairs[j].y * pairs[j].y;
  return warp_sum(sum);
}

// The compressed KV of an entry: rotated, e2m1 with one E4M3 scale per 16 columns.
DEVICE void write_entry(const Compress& p, const float2 (&latent)[PAIRS], const float2* turns, i64 place) {
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    int pair = pair_of_lane(j), rotary = pair - (HEAD_DIM - ROPE_DIMS) / 2;
    float2 v = has_pair(j) && rotary >= 0 ? turn(latent[j], turns[rotary]) : latent[j];
    float amax = fmaxf(fabsf(v.x), fabsf(v.y));
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) amax = fmaxf(amax, shuffle_xor(amax, m));
    u32 scale_code = f32x2_to_e4m3x2(fminf(fmaxf(amax, 6.0f / 512.0f) / 6.0f, 448.0f), 0.0f) & 255u;
    float scale = e4m3_to_f32(scale_code);
    if (!has_pair(j)) continue;
    p.kv_codes[place * (HEAD_DIM / 2) + pair] = (u8)(f32_to_e2m1(v.x / scale) | f32_to_e2m1(v.y / scale) << 4);
    if (lane_id() % 8 == 0) p.kv_scales[place * (HEAD_DIM / 16) + pair / 8] = (u8)scale_code;
  }
}

// The index key of an entry from wk times its latent, in two parts: norm, rotation, e2m1 with one UE8M0 scale per 32
// columns.
DEVICE void write_key(const Compress& p, const float* first, const float* second, const u32 (&norm)[KEY_PAIRS],
                      const float2* turns, i64 place) {
  float2 key[KEY_PAIRS];
#pragma unroll
  for (int j = 0; j < KEY_PAIRS; j++) {
    int pair = lane_id() + 32 * j;
    key[j] = make_float2(0.0f, 0.0f);
    if (pair < INDEX_HEAD_DIM / 2)
      key[j] = make_float2(round_bf16(first[2 * pair] + second[2 * pair]),
                           round_bf16(first[2 * pair + 1] + second[2 * pair + 1]));
  }
  normalize(key, norm, sum_squares(key), INDEX_HEAD_DIM);
#pragma unroll
  for (int j = 0; j < KEY_PAIRS; j++) {
    int pair = lane_id() + 32 * j, rotary = pair - (INDEX_HEAD_DIM - ROPE_DIMS) / 2;
    bool inside = pair < INDEX_HEAD_DIM / 2;
    float2 v = inside && rotary >= 0 ? turn(key[j], turns[rotary]) : key[j];
    float amax = fmaxf(fabsf(v.x), fabsf(v.y));
#pragma unroll
    for (int m = 1; m < 16; m <<= 1) amax = fmaxf(amax, shuffle_xor(amax, m));
    u32 scale_code = fp4_scale_code(amax);
    float inverse = ue8m0_inverse(scale_code);
    u32 codes = f32_to_e2m1(v.x * inverse) | f32_to_e2m1(v.y * inverse) << 4;
    if (inside) p.key_codes[place * (INDEX_HEAD_DIM / 2) + pair] = (u8)codes;
    if (inside && lane_id() % 16 == 0) p.key_scales[place * (INDEX_HEAD_DIM / 32) + pair / 16] = (u8)scale_code;
  }
}

KERNEL(compress, Compress, WARPS * 32, 2) {
  launch_dependents();
  Shared& s = *(Shared*)shared_memory();
  if (threadIdx.x == 0) {
    barrier_init(&s.ready, 1);
    barrier_init_fence();
    barrier_expect(&s.ready, WK_BYTES);
    for (u32 at = 0; at < WK_BYTES; at += COPY_BYTES)
      bulk_copy((u8*)s.wk + at, (const u8*)p.wk + at, min(WK_BYTES - at, COPY_BYTES), &s.ready);
  }
  int lane = lane_id(), which = warp_id() % ROWS, row = (int)blockIdx.x * ROWS + which;
  u32 norm[PAIRS], k_norm[KEY_PAIRS];  // bf16 pairs of the lane's columns
#pragma unroll
  for (int j = 0; j < PAIRS; j++) norm[j] = has_pair(j) ? ((const u32*)p.norm)[pair_of_lane(j)] : 0;
#pragma unroll
  for (int j = 0; j < KEY_PAIRS; j++) {
    int pair = lane + 32 * j;
    k_norm[j] = pair < INDEX_HEAD_DIM / 2 ? ((const u32*)p.k_norm)[pair] : 0;
  }
  if (!p.early) wait_for_dependencies();
  int slot = row < p.rows ? load_l2(p.row_slot + row) : -1;
  int position = slot >= 0 ? load_l2(p.row_position + row) : 0;
  bool closes = slot >= 0 && (position + 1) % RATIO == 0;
  i64 place = 0;
  if (closes) {
    int entry = position / RATIO;
    i64 page = load_l2(p.page_table + (i64)slot * p.pages_per_slot + entry / ENTRIES_PER_PAGE);
    place = page * ENTRIES_PER_PAGE + entry % ENTRIES_PER_PAGE;
    for (int i = half() * 32 + lane; i < ROPE_DIMS / 2; i += 64) {
      float sine, cosine;
      sincos_accurate((float)(entry * RATIO) * p.frequencies[i], &sine, &cosine);
      s.turns[which][i] = make_float2(cosine, sine);
    }
  }
  if (p.early) wait_for_dependencies();

  float2 latent[PAIRS], own[PARTS * PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; j++) latent[j] = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int j = 0; j < PARTS * PAIRS; j++) {
    int part = j / PAIRS;
    own[j] = make_float2(0.0f, 0.0f);
    if (slot < 0 || !has_pair(j % PAIRS)) continue;
    const float2* raw = (const float2*)(p.raw + (i64)row * p.raw_stride + p.raw_column + part * HEAD_DIM);
    float2 v = load_l2(raw + pair_of_lane(j % PAIRS));
    own[j] = RATIO == 1 ? make_float2(round_bf16(v.x), round_bf16(v.y)) : v;
  }
  if (closes) pool(latent, own, p, row, slot, position);
  float squares = sum_squares(latent);
  if (lane == 0) s.squares[half()][which] = squares;
  sync_block();
  normalize(latent, norm, s.squares[0][which] + s.squares[1][which], HEAD_DIM);
#pragma unroll
  for (int j = 0; j < PAIRS; j++)
    if (has_pair(j)) s.latent[which][pair_of_lane(j)] = f32x2_to_bf16x2(latent[j].x, latent[j].y);
  sync_block();  // the barrier's initialization is visible to all, too
  barrier_wait(&s.ready, 0);

  if (which < TILES) {
    const u32* column = s.latent[lane / 4] + half() * HALF_PAIRS + lane % 4;
    float d[2][4] = {};  // two chains, for the products' latency
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      uint4 a = s.wk[which][half()][step][lane];
      mma_bf16(d[step % 2], a.x, a.y, a.z, a.w, column[step * 8], column[step * 8 + 4]);
    }
    int output = which * 16 + lane / 4, n = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) s.key[half()][n + i % 2][output + i / 2 * 8] = d[0][i] + d[1][i];
  }
  if (closes) write_entry(p, latent, s.turns[which], place);
  if (slot >= 0) {  // behind the reads of the ring's earlier positions: they lie in front of a barrier
    i64 at = (i64)slot * p.ring_length + position % p.ring_length;
    float2* ring = (float2*)(p.ring + at * (PARTS * HEAD_DIM));
#pragma unroll
    for (int j = 0; j < PARTS * PAIRS; j++)
      if (has_pair(j % PAIRS)) ring[j / PAIRS * (HEAD_DIM / 2) + pair_of_lane(j % PAIRS)] = own[j];
  }
  sync_block();
  if (closes && half() == 0) write_key(p, s.key[0][which], s.key[1][which], k_norm, s.turns[which], place);
}
