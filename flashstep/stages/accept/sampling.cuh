// Random numbers, exponential races and distributions of rows, for acceptance and drafting alike; reference.py defines
// all of them. Integers (the random words, the order of logits) equal the reference's bit for bit, the rest is float32.
#pragma once
#include "common.cuh"

constexpr int DRAFT = 0, ACCEPT = 1, RESIDUAL = 2, BONUS = 3;  // reference.Purpose
constexpr int NO_ID = 0x7FFFFFFF;                              // loses every tie
DEVICE float negative_infinity() { return as_float(0xFF800000u); }

// ---- random numbers ---------------------------------------------------------------------------------------------

// Philox-4x32-10: the words of lanes 4 group .. 4 group + 3 of `uniform`.
DEVICE uint4 random_words(u64 seed, int start, int position, int purpose, u32 group) {
  u32 c0 = group, c1 = (u32)position, c2 = (u32)start, c3 = (u32)purpose, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u32 high0 = multiply_high(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    u32 high1 = multiply_high(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// u = (word + 1/2) / 2^32, exactly.
DEVICE double uniform(u32 word) { return ((double)word + 0.5) * 0x1p-32; }

// -log(1 - u), never 0 and never infinite. Both ends keep float32's relative accuracy: near u = 1 the complement is
// formed in integers, near u = 0 the rounding of 1 - u is divided out again.
DEVICE float exponential(u32 word) {
  bool upper = word >> 31;
  float u = ((float)word + 0.5f) * 0x1p-32f;
  float rest = upper ? ((float)~word + 0.5f) * 0x1p-32f : 1.0f - u;
  float log_rest = log_accurate(rest);
  if (upper) return -log_rest;
  return rest == 1.0f ? u : log_rest * (u / (rest - 1.0f));
}

// ---- comparisons ------------------------------------------------------------------------------------------------

DEVICE bool is_finite(float x) { return (as_bits(x) & 0x7F800000u) != 0x7F800000u; }

// Unsigned integers in the order of the finite floats; the sum makes one of the two zeros.
DEVICE u32 order_key(float x) {
  u32 bits = as_bits(x + 0.0f);
  return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}

// The float of a key.
DEVICE float float_of_key(u32 key) { return as_float(key ^ ((u32)((i32)~key >> 31) | 0x80000000u)); }

DEVICE bool beats(float score, i32 id, float other, i32 other_id) {
  return score > other || (score == other && id < other_id);
}

// The best (score, id) of the lanes, in all lanes.
DEVICE void warp_best(float& score, i32& id) {
#pragma unroll
  for (int m = 16; m; m >>= 1) {
    float other = shuffle_xor(score, m);
    i32 other_id = shuffle_xor(id, m);
    if (beats(other, other_id, score, id)) score = other, id = other_id;
  }
}

// ---- distributions ----------------------------------------------------------------------------------------------

// 1 / temperature; 0 for greedy requests. A temperature below 1e-30 leaves nothing but the maximum either way.
DEVICE float inverse_of(float temperature) { return temperature > 0 ? 1.0f / fmaxf(temperature, 1e-30f) : 0.0f; }

// exp of a logit relative to the row's maximum: 1 for the maximum at any temperature.
DEVICE float softmax_weight(float logit, float max, float inverse) { return exp_accurate((logit - max) * inverse); }

// The distribution of a verified row. Filters keep a prefix of the ranking by (falling logit, rising id), which ends
// with the token (key, last); min_p needs no more than the weight. Without filters key = 0 keeps all.
struct Target {
  float max, inverse, norm, min_p;
  u32 key;
  i32 last;
};

// Weight of token `id`, 0 where filtered; times `norm` it is the probability.
DEVICE float target_weight(const Target& t, float logit, i32 id) {
  float weight = softmax_weight(logit, t.max, t.inverse);
  u32 key = order_key(logit);
  bool kept = (key > t.key || (key == t.key && id <= t.last)) && weight >= t.min_p;
  return kept ? weight : 0.0f;
}
