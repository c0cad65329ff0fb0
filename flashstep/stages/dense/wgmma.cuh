// Products of fp8 weights and up to 8 rows of fp8 activations by wgmma, which takes the codes as they are.
//
// A warpgroup has 64 outputs (a tile of 16 a warp) and its part of the block's K: a lane's 16 bytes of every unit are in
// registers before the wait. Activations pass through shared memory. Every group of 32 columns has accumulators of its
// own, BATCH groups in flight twice over; the tensor core keeps about 13 bits below the largest product of a group.
//
// Included by product.cuh.
#pragma once

constexpr int BATCH = PER_PART > 16 && BLOCKS_PER_SM > 1 ? 2 : 4;
constexpr int BATCHES = (PER_PART + BATCH - 1) / BATCH;
constexpr int WEIGHT_SCALES = (PER_PART + 31) / 32;  // of a lane

// Every use of `d` stays behind this: the compiler knows nothing of products in flight.
template <int N> DEVICE void settle(float (&d)[N]) {
#ifndef FLASHSTEP_EMULATE
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

template <class P> DEVICE void wgmma_block(const P& p, int s, int first_tile, u8* shared) {
  constexpr int STRIDE = sums_stride(4), SHARE = items_per_block(4);
  Block b = block_of<FP8>(p, s, first_tile, shared);
  NormPart norm_part;
  prepare<FP8>(b, p);
  load_norm(norm_part, p);
  int warp = shuffle(warp_id(), 0);  // a value that the compiler knows to be the warp's: descriptors stay uniform
  int lane = lane_id(), part = warp >> 2, tile = warp & 3, first = part * PER_PART;  // in the slice

  u8* const x_codes = shared + X_AT;                      // [group of the slice][256]
  float* const x_scales = (float*)(x_codes + X_BYTES);    // [group][8]
  uint4 a[PER_PART];
  float w_scale[WEIGHT_SCALES];  // stored behind the wait: storing it waits for what was asked for before
  float* w_scales = x_scales + SLICE * 8 + warp * PER_PART;
  {
    bool here = whole_blocks(FP8) || (first_tile + tile) * 16 < outputs_of(s);
    const u8* weight = p.weight[s] + (i64)(first_tile + tile) * PACKED_GROUPS * 516;
    const u8* units = weight + (b.first_group + first) * 512 + lane * 16;
    const float* scales = (const float*)(weight + PACKED_GROUPS * 512) + b.first_group + first;
#pragma unroll
    for (int i = 0; i < WEIGHT_SCALES; ++i) {
      int g = i * 32 + lane;
      w_scale[i] = 0.0f;
      if (here && g < PER_PART && first + g < b.groups) w_scale[i] = scales[g];
    }
#pragma unroll
    for (int g = 0; g < PER_PART; ++g) {
      a[g] = make_uint4(0, 0, 0, 0);
      if (here && (EVEN || first + g < b.groups)) a[g] = load_stream(units + g * 512);
    }
    if constexpr (!EVEN) {  // groups that are not there: zeros, since 0 times NaN is NaN
      for (int i = threadIdx.x; i < X_BYTES / 16; i += THREADS)
        if (i / 16 >= b.groups) ((uint4*)x_codes)[i] = make_uint4(0, 0, 0, 0);
      for (int i = threadIdx.x; i < SLICE * 8; i += THREADS)
        if (i / 8 >= b.groups) x_scales[i] = 0.0f;
    }
  }
  // Codes come by cp.async, 16 bytes of row i % 8 by thread i; scales through registers, since they become float32.
  // Rows that are not there cost no traffic.
  const int thread = (int)threadIdx.x;
  static_assert(SLICE <= THREADS, "a thread copies the scales of a group");
  const u8* codes_from = (const u8*)p.x[s] + b.first_group * 256 + thread * 16;
  const u8* scales_from = p.x_scales[s] + b.first_group * 8 + thread * 8;
  int row = thread % 8;
  bool has_group = EVEN ? thread < SLICE : thread < b.groups;
  pin(codes_from), pin(scales_from);
  await_turn(shared, norm_part);
  if constexpr (PROLOGUE != NO_PROLOGUE) {
    quantize_input(p, p.x[s], shared, [&](int group, int row, int quarter, uint2 words, u32 code) {
      *(uint2*)(x_codes + codes_offset(group, row, quarter)) = words;
      if (quarter == 0) x_scales[group * 8 + row] = as_float(code << 23);
    });
  } else {
#pragma unroll
    for (int base = 0; base < SLICE * 16; base += THREADS)
      if ((SLICE * 16 % THREADS == 0 || base + THREADS < SLICE * 16 || base + thread < SLICE * 16) &&
          (EVEN || (base + thread) / 16 < b.groups) && row < p.rows)
        cp_async16(x_codes + thread * 16 + base * 16, codes_from + base * 16);
    cp_async_commit();
    if (has_group) {
      uint2 codes = load_l2((const uint2*)scales_from);
      u32 low = codes.x, high = codes.y;
      float4* to = (float4*)(x_scales + thread * 8);
      // Codes of activations are above 0 (fp8_scale_code), so a shift decodes them.
      to[0] = {as_float((low & 255u) << 23), as_float((low >> 8 & 255u) << 23), as_float((low >> 16 & 255u) << 23),
               as_float(low >> 24 << 23)};
      to[1] = {as_float((high & 255u) << 23), as_float((high >> 8 & 255u) << 23), as_float((high >> 16 & 255u) << 23),
               as_float(high >> 24 << 23)};
    }
    cp_async_wait<0>();
  }
#pragma unroll
  for (int i = 0; i < WEIGHT_SCALES; ++i)  // read by the same warp, behind a barrier
    if (i * 32 + lane < PER_PART) w_scales[i * 32 + lane] = w_scale[i];
  fence_async();
  sync_block();

  // d: of BATCH groups from BATCH * batch.
  const u64 codes = wgmma_descriptor(x_codes + first * 256);
  const float* scales = x_scales + first * 8 + scales_offset();
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[2][BATCH][4];
  auto start_batch = [&](int batch) {
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      int g = batch * BATCH + i;
      if (g < PER_PART) wgmma_e4m3(d[batch & 1][i], a[g].x, a[g].y, a[g].z, a[g].w, wgmma_further(codes, g * 256));
    }
    wgmma_commit();
  };
  start_batch(0);
#pragma unroll
  for (int batch = 0; batch < BATCHES; ++batch) {
    if (batch + 1 < BATCHES) start_batch(batch + 1);
    float even[BATCH], odd[BATCH];  // while the products run
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      int g = min(batch * BATCH + i, PER_PART - 1);
      float2 x = *(const float2*)(scales + g * 8);
      even[i] = w_scales[g] * x.x, odd[i] = w_scales[g] * x.y;
    }
    if (batch + 1 < BATCHES) wgmma_wait<1>();
    else wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (batch * BATCH + i >= PER_PART) continue;
      float(&sum)[4] = d[batch & 1][i];
      settle(sum);
      acc[0] = fmaf(sum[0], even[i], acc[0]);
      acc[1] = fmaf(sum[1], odd[i], acc[1]);
      acc[2] = fmaf(sum[2], even[i], acc[2]);
      acc[3] = fmaf(sum[3], odd[i], acc[3]);
    }
  }
  Block end = block_of<FP8>(p, s, first_tile, shared);  // once more, rather than kept in registers
  if constexpr (CLUSTER > 1) {                          // straight to the blocks that finish the outputs
    u64* inbox = inbox_of(end, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int its_row = 2 * (lane & 3) + (i & 1), item = its_row * 16 + tile * 4 + (i >> 1) * 2 + (lane >> 4);
      float* to = (float*)(shared + MAIL_AT) + ((end.rank * WARPGROUPS + part) * SHARE + item % SHARE) * 4;
      if (its_row < p.rows) cluster_store(to + (lane >> 2 & 3), item / SHARE, acc[i], inbox);
    }
    await_mail<FP8>(end, p, 0);
  } else {
    store_accumulators((float*)(shared + SUMS_AT) + part * 8 * STRIDE + tile * 16, STRIDE, acc);
    sync_block();
    finish_pass<FP8>(end, p, 0);
  }
}
