// Products of more than 8 rows by wgmma: ROW_TILES tiles of 8 rows at a time beside 64 outputs.
//
// A block takes 64 outputs, whose K its warpgroups share, or 64 for each warpgroup. A lane's part of the weights is asked
// for before the wait and stays in registers, bf16 decoded; rows come in passes, by bulk copies into shared memory, a pass
// ahead of the products. fp8 x fp8: a group of 32 columns has accumulators of its own, which are scaled and added while
// the next group's product runs; the tensor core keeps about 13 bits below the largest product of a group.
//
// Included by product.cuh.
#pragma once

DEVICE constexpr int k_parts(int kind) { return WARPS / tiles_per_block(kind); }
DEVICE constexpr int registers_of(int kind) { return kind == FP8 ? 4 : 8; }  // of a lane, for a group

// fp8 codes of a lane as m16n8k16 orders their columns: word i of a unit has columns 4 q .. 4 q + 3 of 16 where the
// product wants 2 q, 2 q + 1, 2 q + 8, 2 q + 9. By whole warps.
DEVICE u32 columns_of_16(u32 word) {
  int lane = lane_id(), from = (lane & ~3) + (lane & 3) / 2;
  u32 low = shuffle(word, from), high = shuffle(word, from + 2);
  return permute_bytes(low, high, lane & 1 ? 0x7632 : 0x5410);
}

template <int KIND, class P> DEVICE void wide_block(const P& p, int s, int first_tile, u8* shared) {
  constexpr int TILES = tiles_per_block(KIND), STRIDE = sums_stride(TILES), REGISTERS = registers_of(KIND);
  constexpr int PARTS = k_parts(KIND), PER = SLICE / PARTS, N = 4 * ROW_TILES;
  constexpr int X_GROUP = fragment_bytes(KIND), X_TILE = SLICE * X_GROUP;  // bytes of 8 rows
  constexpr int X_SCALES = KIND == FP8 ? ROW_TILES * SLICE : 0;            // of 8 codes
  constexpr int SCALES_PER_THREAD = (X_SCALES + THREADS - 1) / THREADS;
  Block b = block_of<KIND>(p, s, first_tile, shared);
  u64* full = (u64*)(shared + INBOX_AT) + 2;  // two
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init(full + 1, 1);
    barrier_init_fence();
  }
  prepare<KIND>(b, p);
  int warp = shuffle(warp_id(), 0);  // a value that the compiler knows to be the warp's: descriptors stay uniform
  int lane = lane_id(), tile = warp % TILES, part = warp / TILES;
  int first = part * PER;  // group in the slice

  auto x_codes = [&](int which) { return shared + X_AT + which * ROW_TILES * X_TILE; };
  auto x_scales = [&](int which) {
    return (float*)(shared + X_AT + X_BUFFERS * ROW_TILES * X_TILE) + which * X_SCALES * 8;
  };
  float* w_scales = (float*)(shared + X_AT + X_BUFFERS * ROW_TILES * (X_TILE + (KIND == FP8 ? SLICE * 32 : 0))) + warp * PER;

  bool here = whole_blocks(KIND) || (first_tile + tile) * 16 < outputs_of(s);
  const u8* weight = p.weight[s] + (i64)(first_tile + tile) * (packed_groups(KIND) * group_bytes(KIND));
  const u8* units_at = weight + (b.first_group + first) * unit_bytes(KIND) + lane * 16;
  const float* scales_at = (const float*)(weight + packed_groups(KIND) * unit_bytes(KIND)) + b.first_group + first;
  auto exists = [&](int g) { return here && (EVEN || first + g < b.groups); };
  Unit units[PER];
#pragma unroll
  for (int g = 0; g < PER; ++g) {
    units[g].first = units[g].second = make_uint4(0, 0, 0, 0);
    if (exists(g)) stream_unit<KIND>(units[g], units_at + g * unit_bytes(KIND));
  }
  float scale[(PER + 31) / 32];
#pragma unroll
  for (int i = 0; i < (PER + 31) / 32; ++i) {
    int g = i * 32 + lane;
    scale[i] = 0.0f;
    if (KIND != BF16 && g < PER && exists(g)) scale[i] = scales_at[g];
  }
  if constexpr (!EVEN) {  // groups that are not there: zeros, since 0 times NaN is NaN
    for (int i = threadIdx.x; i < X_BUFFERS * ROW_TILES * X_TILE / 16; i += THREADS)
      if (i % (X_TILE / 16) / (X_GROUP / 16) >= b.groups) ((uint4*)(shared + X_AT))[i] = make_uint4(0, 0, 0, 0);
    fence_async();
  }

  auto start_copies = [&](int pass) {  // by one thread
    int tiles = min(ROW_TILES, (p.rows + 7) / 8 - pass * ROW_TILES), which = pass % X_BUFFERS;
    if (tiles <= 0 || b.groups <= 0) return;
    u32 bytes = (u32)b.groups * X_GROUP;
    barrier_expect(full + which, tiles * bytes);
    const u8* from = (const u8*)p.x[s] + ((i64)pass * ROW_TILES * GROUPS + b.first_group) * X_GROUP;
    for (int j = 0; j < tiles; ++j) bulk_copy(x_codes(which) + j * X_TILE, from + (i64)j * GROUPS * X_GROUP, bytes, full + which);
  };
  uint2 scales_ahead[SCALES_PER_THREAD + 1];
  auto load_x_scales = [&](int pass) {
#pragma unroll
    for (int k = 0; k < SCALES_PER_THREAD; ++k) {
      int i = k * THREADS + (int)threadIdx.x, row_tile = pass * ROW_TILES + i / SLICE, group = i % SLICE;
      scales_ahead[k].x = scales_ahead[k].y = 0;
      if (i < X_SCALES && group < b.groups && row_tile * 8 < p.rows)
        scales_ahead[k] =
            load_l2((const uint2*)(p.x_scales[s] + ((i64)row_tile * GROUPS + b.first_group + group) * 8));
    }
  };
  auto store_x_scales = [&](int pass) {
    float4* to = (float4*)x_scales(pass % X_BUFFERS);
#pragma unroll
    for (int k = 0; k < SCALES_PER_THREAD; ++k) {
      int i = k * THREADS + (int)threadIdx.x;
      u32 low = scales_ahead[k].x, high = scales_ahead[k].y;
      if (i < X_SCALES) {
        // Codes of activations are above 0 (fp8_scale_code), so a shift decodes them.
        to[2 * i] = {as_float((low & 255u) << 23), as_float((low >> 8 & 255u) << 23),
                     as_float((low >> 16 & 255u) << 23), as_float(low >> 24 << 23)};
        to[2 * i + 1] = {as_float((high & 255u) << 23), as_float((high >> 8 & 255u) << 23),
                         as_float((high >> 16 & 255u) << 23), as_float(high >> 24 << 23)};
      }
    }
  };

  if (CLUSTER > 1) cluster_wait();
  sync_block();  // the barriers are there
  await_dependencies();
  if (threadIdx.x == 0) start_copies(0);
  load_x_scales(0);

  // What waits for the weights, which may come late: a block alone on its multiprocessor starts when the one before ends.
  u32 a[PER][REGISTERS];
#pragma unroll
  for (int g = 0; g < PER; ++g) {
    uint4 words = units[g].first;
    if constexpr (KIND == FP8) {
      a[g][0] = words.x, a[g][1] = words.y, a[g][2] = words.z, a[g][3] = words.w;
    } else {
      Operand w;
      if (KIND == FP8_AT_BF16)
        units[g].first =
            make_uint4(columns_of_16(words.x), columns_of_16(words.y), columns_of_16(words.z), columns_of_16(words.w));
      decode_unit<KIND>(w, units[g], KIND == BF16 ? 1.0f : shuffle(scale[g / 32], g % 32));
#pragma unroll
      for (int i = 0; i < REGISTERS; ++i) a[g][i] = w.a[i];
    }
  }
  if constexpr (KIND == FP8) {  // read by the same warp, behind a barrier
#pragma unroll
    for (int i = 0; i < (PER + 31) / 32; ++i)
      if (i * 32 + lane < PER) w_scales[i * 32 + lane] = scale[i];
  }

#pragma unroll 1
  for (int pass = 0; pass < PASSES; ++pass) {
    store_x_scales(pass);
    sync_block();  // also: the last pass's activations and sums are read
    if (pass + 1 < PASSES) {
      if (threadIdx.x == 0) start_copies(pass + 1);
      load_x_scales(pass + 1);
    }
    if (b.groups > 0) barrier_wait(full + pass % X_BUFFERS, pass / X_BUFFERS & 1);
    u64 codes = wgmma_descriptor(x_codes(pass % X_BUFFERS) + first * X_GROUP, X_TILE);
    float acc[N];
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i] = 0.0f;
    if constexpr (KIND == FP8) {
      const float* scales = x_scales(pass % X_BUFFERS) + first * 8 + scales_offset();
      float d[2][N];
      auto start = [&](int g) {
        wgmma_begin();
        wgmma_e4m3(d[g & 1], a[g][0], a[g][1], a[g][2], a[g][3], wgmma_further(codes, g * X_GROUP));
        wgmma_commit();
      };
      start(0);
#pragma unroll
      for (int g = 0; g < PER; ++g) {
        if (g + 1 < PER) start(g + 1);
        float even[ROW_TILES], odd[ROW_TILES];  // while the products run
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j) {
          float2 x = *(const float2*)(scales + (j * SLICE + g) * 8);
          even[j] = w_scales[g] * x.x, odd[j] = w_scales[g] * x.y;
        }
        if (g + 1 < PER) wgmma_wait<1>();
        else wgmma_wait<0>();
        settle(d[g & 1]);
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j) {
          acc[4 * j] = fmaf(d[g & 1][4 * j], even[j], acc[4 * j]);
          acc[4 * j + 1] = fmaf(d[g & 1][4 * j + 1], odd[j], acc[4 * j + 1]);
          acc[4 * j + 2] = fmaf(d[g & 1][4 * j + 2], even[j], acc[4 * j + 2]);
          acc[4 * j + 3] = fmaf(d[g & 1][4 * j + 3], odd[j], acc[4 * j + 3]);
        }
      }
    } else {
      wgmma_begin();
#pragma unroll
      for (int g = 0; g < PER; ++g)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          wgmma_bf16(acc, a[g][4 * half], a[g][4 * half + 1], a[g][4 * half + 2], a[g][4 * half + 3],
                     wgmma_further(codes, g * X_GROUP + half * 256));
      wgmma_commit();
      wgmma_wait<0>();
      settle(acc);
    }
    float* sums = (float*)(shared + SUMS_AT) + part * ROW_TILES * 8 * STRIDE + tile * 16;
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j)
      store_accumulators(sums + j * 8 * STRIDE, STRIDE, {acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]});
    sync_block();
    finish_pass<KIND>(b, p, pass);
  }
}
