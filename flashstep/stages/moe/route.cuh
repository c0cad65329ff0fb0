// The router's choice: section 8 of docs/model.md, in float32.
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

// A warp chooses for `row`, whose scores and biases its lanes hold: places row * TOP_K .. of `experts` and `weights`. An
// inactive row chooses -1 with weight 0.
DEVICE void route_row(const float (&score)[PER_LANE], const float (&bias)[PER_LANE], bool active, int row, int* experts,
                      float* weights) {
  int lane = lane_id();
  float sum = 0.0f, chosen = 0.0f;
  u32 key[PER_LANE];  // orders as the biased score does; 0 is below every expert's
  if (!active) {
    if (lane < TOP_K) experts[row * TOP_K + lane] = -1, weights[row * TOP_K + lane] = 0.0f;
    return;
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    // fmaxf also turns a NaN into the lowest score: the indices stay those of experts.
    u32 bits = as_bits(fmaxf(score[i] + bias[i], -2.0e38f));
    key[i] = lane * PER_LANE + i < EXPERTS ? bits ^ ((bits >> 31) ? 0xFFFFFFFFu : 0x80000000u) : 0u;
  }
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    u32 best = key[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; i++) best = max(best, key[i]);
    u32 highest = warp_max_u32(best);
    int owner = lowest_bit(ballot(best == highest)), place = 0;
    float value = 0.0f;
    bool found = lane != owner;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      bool here = !found && key[i] == highest;
      if (here) place = i, value = score[i], key[i] = 0u;
      found |= here;
    }
    value = shuffle(value, owner);
    sum += value;
    if (lane == k) chosen = value;
    if (lane == owner) experts[row * TOP_K + k] = owner * PER_LANE + place;
  }
  if (lane < TOP_K) weights[row * TOP_K + lane] = chosen / (sum + 1e-20f) * SCALING;
}
