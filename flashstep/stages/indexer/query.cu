// Prepares a choice: index queries as operands of the score product, head weights, and the plan of the score scratch.
//
// Block r serves row r; the last block plans for all rows while the others work.
#include "choose.cuh"

// Constants: HEADS, INDEX_HEAD_DIM, ROPE_DIMS, WEIGHT_SCALE.
constexpr int THREADS = 512;
constexpr int PADDED_HEADS = (HEADS + 7) / 8 * 8;   // whole columns of the product; the padding weighs nothing
constexpr int WORDS = INDEX_HEAD_DIM / 32;          // of 8 columns, that a lane of the product holds of a head
constexpr int QUERY_GAIN = 64;                      // exponent; the keys carry the opposite one (score.cu)

union Shared {
  float2 turns[ROPE_DIMS / 2];  // cosine and sine
  struct { i32 slot[THREADS]; i32 eligible[THREADS]; u8 needs[THREADS]; int totals[3][32]; } plan;
};

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

DEVICE void prepare_row(const Query& p, Shared& s, int row, int position) {
  if (threadIdx.x < ROPE_DIMS / 2) {
    float sine, cosine;
    sincos_accurate((float)position * p.frequencies[threadIdx.x], &sine, &cosine);
    s.turns[threadIdx.x] = make_float2(cosine, sine);
  }
  sync_block();
  for (int piece = threadIdx.x; piece < PADDED_HEADS * INDEX_HEAD_DIM / 8; piece += THREADS) {  // whole warps
    int head = piece / (INDEX_HEAD_DIM / 8), column = piece % (INDEX_HEAD_DIM / 8) * 8;
    float x[8] = {};
    if (head < HEADS) {
      const bf16* query = p.query + (i64)row * p.query_stride + p.query_column;
      uint4 v = load_l2((const uint4*)(query + head * INDEX_HEAD_DIM + column));
      u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float a = bf16x2_low(words[i]), b = bf16x2_high(words[i]);
        int rotary = column / 2 + i - (INDEX_HEAD_DIM - ROPE_DIMS) / 2;
        if (rotary >= 0) {
          float2 t = s.turns[rotary];
          float turned = round_bf16(a * t.x - b * t.y);
          b = round_bf16(a * t.y + b * t.x);
          a = turned;
        }
        x[2 * i] = a;
        x[2 * i + 1] = b;
      }
    }
    // Lane 4 (head % 8) + q of the product holds columns q INDEX_HEAD_DIM / 4 + 8 word + 0..7.
    int q = column / (INDEX_HEAD_DIM / 4), word = column / 8 % WORDS, lane = head % 8 * 4 + q;
    p.operands[(((i64)row * (PADDED_HEADS / 8) + head / 8) * WORDS + word) * 32 + lane] = quantize(x);
  }
  if (threadIdx.x < PADDED_HEADS) {
    const float* weights = p.weights + (i64)row * p.weights_stride + p.weights_column;
    float w = threadIdx.x < HEADS ? load_l2(weights + threadIdx.x) : 0.0f;
    p.head_weights[row * PADDED_HEADS + threadIdx.x] = round_bf16(w) * WEIGHT_SCALE;
  }
}

DEVICE void plan_scratch(const Query& p, Shared& shared) {
  auto& s = shared.plan;
  int row = threadIdx.x;
  int slot = row < p.rows ? load_l2(p.row_slot + row) : -1;
  int visible = slot < 0 ? 0 : visible_entries(load_l2(p.row_position + row), slot);
  s.slot[row] = slot;
  s.eligible[row] = eligible_entries(visible);
  s.needs[row] = needs_scores(visible);
  sync_block();
  int rows = 0, extent = 0;
  if (slot >= 0) {
    int before = 0;  // rows of the same request
    while (before < row && s.slot[row - before - 1] == slot) before++;
    bool needs = false;
    if (before % GROUP_ROWS == 0)
      for (; rows < GROUP_ROWS && row + rows < p.rows && s.slot[row + rows] == slot; rows++) {
        extent = max(extent, s.eligible[row + rows]);
        needs |= s.needs[row + rows] != 0;
      }
    if (!needs) rows = 0;
  }
  int tiles = rows ? (extent + TILE - 1) / TILE : 0;
  int cost = tiles * (rows + DECODE_COST), keys = tiles * TILE * rows;
  int cost_end = scan_block<THREADS>(cost, s.totals[0]);
  int keys_end = scan_block<THREADS>(keys, s.totals[1]);
  int groups_end = scan_block<THREADS>(rows > 0, s.totals[2]);
  Group* groups = (Group*)(p.plan + sizeof(Header) / 4);
  if (rows) {
    int wave = (keys_end - keys) / p.wave_keys, offset = (keys_end - keys) % p.wave_keys;
    groups[groups_end - 1] = Group{row, rows, extent, slot, cost_end - cost, wave, offset, tiles * TILE};
    for (int i = 0; i < rows; i++) p.places[row + i] = make_int2(wave, offset + i * tiles * TILE);
  }
  if (row == THREADS - 1) *(Header*)p.plan = Header{groups_end, cost_end, {}};
}

KERNEL(query, Query, THREADS, 1) {
  launch_dependents();
  Shared& s = *(Shared*)shared_memory();
  wait_for_dependencies();
  int row = (int)blockIdx.x;
  if (row == p.rows) {
    plan_scratch(p, s);
    return;
  }
  int slot = load_l2(p.row_slot + row), position = load_l2(p.row_position + row);
  if (needs_scores(visible_entries(position, slot))) prepare_row(p, s, row, position);
}
