// A verified row over shards of the vocabulary: how it is split over blocks, and what ranks tell each other of it.
//
// Compiled with VOCAB (of the shard, a multiple of 16), WORLD, CLUSTER (blocks of a row).
#pragma once
#include "accept/sampling.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROW_WORDS = 8;
static_assert(VOCAB % 16 == 0, "16-byte loads, and a random block of four tokens is never split");

constexpr int part_of(int parts) { return (VOCAB / 4 + parts - 1) / parts * 4; }
constexpr int CHUNK = part_of(CLUSTER);
DEVICE int size_of(int begin, int chunk) { return max(0, min(chunk, VOCAB - begin)); }

// Of a shard of a row. Filters are known to their own rank alone: a draft that they drop has no logit (-infinity).
struct Record {
  float max, sum;  // the logits' maximum, and the sum of what is kept relative to it
  i32 id;          // the maximum's token
  float drafted;   // the draft's logit, where it lies in the shard
  u32 bad, key;    // a logit that is not finite; what is kept of the shard ends with (key, last)
  i32 last;
};

DEVICE void store_record(u32* const (&out)[8], int row, const Record& record) {
#pragma unroll
  for (int peer = 0; peer < WORLD; peer++) {
    uint4* at = (uint4*)(out[peer] + (i64)row * ROW_WORDS);
    at[0] = make_uint4(as_bits(record.max), as_bits(record.sum), (u32)record.id, as_bits(record.drafted));
    at[1] = make_uint4(record.bad, record.key, (u32)record.last, 0);
  }
}

DEVICE Record load_record(const u32* records, int num_rows, int rank, int row) {
  const uint4* at = (const uint4*)(records + ((i64)rank * num_rows + row) * ROW_WORDS);
  uint4 a = load_l2(at), b = load_l2(at + 1);
  return Record{as_float(a.x), as_float(a.y), (i32)a.z, as_float(a.w), b.x, b.y, (i32)b.z};
}

// The row over all shards; key and last are those of shard `rank`.
DEVICE Record read_row(const u32* records, int num_rows, int rank, int row, float inverse) {
  Record parts[WORLD];
#pragma unroll
  for (int r = 0; r < WORLD; r++) parts[r] = load_record(records, num_rows, r, row);
  Record merged = {negative_infinity(), 0, NO_ID, negative_infinity(), 0, 0, NO_ID};
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    const Record& part = parts[r];
    if (beats(part.max, part.id, merged.max, merged.id)) merged.max = part.max, merged.id = part.id;
    merged.drafted = fmaxf(merged.drafted, part.drafted);
    merged.bad |= part.bad;
    if (r == rank) merged.key = part.key, merged.last = part.last;
  }
#pragma unroll
  for (int r = 0; r < WORLD; r++)
    if (parts[r].sum > 0) merged.sum += parts[r].sum * softmax_weight(parts[r].max, merged.max, inverse);
  return merged;
}

// The sum over the block, in all threads, always added in the same order. `scratch`: WARPS floats of shared memory.
DEVICE float block_sum(float* scratch, float value) {
  value = warp_sum(value);
  sync_block();
  if (lane_id() == 0) scratch[warp_id()] = value;
  sync_block();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += scratch[w];
  return sum;
}
