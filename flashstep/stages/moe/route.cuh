// The router's choice for one row: section 8 of docs/model.md, in float32.
#pragma once
#include "common.cuh"

constexpr int PER_LANE = (EXPERTS + 31) / 32;
static_assert(TOP_K <= 8, "a row chooses at most eight experts");

// A lane's experts are PER_LANE consecutive ones, so that the lowest index of equals is in the lowest lane.
DEVICE void load_lane(float (&values)[PER_LANE], const float* row, int lane) {
  if constexpr (PER_LANE % 4 == 0 && EXPERTS == 32 * PER_LANE) {
#pragma unroll
    for (int i = 0; i < PER_LANE / 4; i++) {
      float4 v = load_l2((const float4*)(row + lane * PER_LANE) + i);
      values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      values[i] = lane * PER_LANE + i < EXPERTS ? load_l2(row + lane * PER_LANE + i) : 0.0f;
  }
}

// A warp chooses for one row; lanes 0..TOP_K - 1 write. An inactive row chooses -1 with weight 0.
DEVICE void route_row(const float* logits, const float (&bias)[PER_LANE], bool active, int* experts, float* weights) {
  int lane = lane_id();
  if (!active) {
    if (lane < TOP_K) experts[lane] = -1, weights[lane] = 0.0f;
    return;
  }
  float score[PER_LANE];
  u32 key[PER_LANE];  // orders as the biased score does; 0 is below every expert's
  load_lane(score, logits, lane);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    score[i] = sqrt_softplus(score[i]);
    // fmaxf also turns a NaN into the lowest score: the indices stay those of experts.
    u32 bits = as_bits(fmaxf(score[i] + bias[i], -2.0e38f));
    key[i] = lane * PER_LANE + i < EXPERTS ? bits ^ ((bits >> 31) ? 0xFFFFFFFFu : 0x80000000u) : 0u;
  }
  int mine = 0;
  float my_score = 0.0f, sum = 0.0f;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    u32 best = key[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; i++) best = max(best, key[i]);
    u32 highest = warp_max_u32(best);
    int owner = lowest_bit(ballot(best == highest));
    int place = 0;
    float best_score = 0.0f;
#pragma unroll
    for (int i = PER_LANE - 1; i >= 0; i--)
      if (key[i] == highest) place = i, best_score = score[i];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane == owner && i == place) key[i] = 0u;
    int chosen = shuffle(place, owner);
    float chosen_score = shuffle(best_score, owner);
    sum += chosen_score;
    if (lane == k) mine = owner * PER_LANE + chosen, my_score = chosen_score;
  }
  if (lane < TOP_K) experts[lane] = mine, weights[lane] = my_score / (sum + 1e-20f) * SCALING;
}
