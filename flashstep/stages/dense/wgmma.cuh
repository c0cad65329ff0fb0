// Products of fp8 weights and fp8 activations by wgmma, which takes the codes as they are: nothing is decoded.
//
// A warpgroup has 64 outputs (a tile of 16 a warp) and its part of the block's K: a lane's 16 bytes of every unit are in
// registers before the wait. Activations pass through shared memory. Every group of 32 columns has accumulators of its
// own, BATCH groups in flight twice over; the tensor core keeps about 13 bits below the largest product of a group.
//
// Included by product.cuh.
#pragma once

constexpr int BATCH = PER_PART > 16 && BLOCKS_PER_SM > 1 ? 2 : 4;
constexpr int BATCHES = (PER_PART + BATCH - 1) / BATCH;
constexpr int X_CHUNKS = ROW_TILES * SLICE * 16;  // of 16 bytes, of a pass
constexpr int X_SCALES = ROW_TILES * SLICE;       // of 8 codes
constexpr int WEIGHT_SCALES = (PER_PART + 31) / 32;    // of a lane
constexpr int SCALES_PER_THREAD = (X_SCALES + THREADS - 1) / THREADS;

// An empty statement that the compiler takes for a change: no use of `d` moves above it.
DEVICE void settle(float (&d)[4]) {
#ifndef FLASHSTEP_EMULATE
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
#endif
}

struct XBuffer {  // a pass's activations in shared memory
  u8* codes;      // [row tile][group of the slice][256]
  float* scales;  // [row tile][group][8]
};
DEVICE XBuffer x_buffer(u8* shared, int which) {
  u8* codes = shared + X_AT + which * ROW_TILES * X_BYTES;
  return {codes, (float*)(shared + X_AT + X_BUFFERS * ROW_TILES * X_BYTES) + which * X_SCALES * 8};
}

template <class P> DEVICE void wgmma_block(const P& p, int s, int first_tile, u8* shared) {
  constexpr int STRIDE = sums_stride(4), SHARE = items_per_block(4);
  Block b = block_of<FP8>(p, s, first_tile, shared);
  NormPart norm_part;
  prepare<FP8>(b, p);
  load_norm(norm_part, p);
  int warp = warp_id(), lane = lane_id(), part = warp >> 2, tile = warp & 3, first = part * PER_PART;  // in the slice

  uint4 a[PER_PART];
  float w_scale[WEIGHT_SCALES];  // stored behind the wait: storing it waits for what was asked for before
  float* w_scales = (float*)(shared + X_AT + X_BUFFERS * ROW_TILES * (X_BYTES + SLICE * 32)) + warp * PER_PART;
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
      for (int i = threadIdx.x; i < X_BUFFERS * X_CHUNKS; i += THREADS)
        if (i / 16 % SLICE >= b.groups) ((uint4*)(shared + X_AT))[i] = make_uint4(0, 0, 0, 0);
      float* x_scales = x_buffer(shared, 0).scales;
      for (int i = threadIdx.x; i < X_BUFFERS * X_SCALES * 8; i += THREADS)
        if (i / 8 % SLICE >= b.groups) x_scales[i] = 0.0f;
    }
  }
  // Copies of a pass: codes by cp.async, 16 bytes of row i % 8 by thread i; scales through registers, since they become
  // float32. Rows that are not there cost no traffic.
  const int thread = (int)threadIdx.x;
  const u8* codes_from = (const u8*)p.x[s] + b.first_group * 256 + thread * 16;
  const u8* scales_from = p.x_scales[s] + b.first_group * 8 + thread % SLICE * 8;
  int row = thread % 8;
  pin(codes_from), pin(scales_from), pin(row);
  uint2 codes_ahead[SCALES_PER_THREAD];
  auto start_copies = [&](int pass) {
    u8* to = x_buffer(shared, pass % X_BUFFERS).codes + thread * 16;
    int first_row = pass * ROW_TILES * 8;
    const u8* codes = codes_from + (i64)pass * (ROW_TILES * GROUPS * 256);
    const u8* scales = scales_from + (i64)pass * (ROW_TILES * GROUPS * 8);
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j)
#pragma unroll
      for (int base = 0; base < SLICE * 16; base += THREADS)
        if ((SLICE * 16 % THREADS == 0 || base + THREADS < SLICE * 16 || base + thread < SLICE * 16) &&
            (EVEN || (base + thread) / 16 < b.groups) && first_row + j * 8 + row < p.rows)
          cp_async16(to + j * X_BYTES + base * 16, codes + j * (GROUPS * 256) + base * 16);
    cp_async_commit();
#pragma unroll
    for (int k = 0; k < SCALES_PER_THREAD; ++k) {
      int i = k * THREADS + thread, j = i / SLICE, group = i % SLICE;
      codes_ahead[k].x = codes_ahead[k].y = 0;
      if (i < X_SCALES && (EVEN || group < b.groups) && first_row + j * 8 < p.rows)
        codes_ahead[k] =
            load_l2((const uint2*)(SCALES_PER_THREAD == 1 ? scales + j * (GROUPS * 8)
                                                          : scales + j * (GROUPS * 8) + (group - thread % SLICE) * 8));
    }
  };
  auto finish_copies = [&](int pass) {  // with a barrier behind it
    float4* to = (float4*)x_buffer(shared, pass % X_BUFFERS).scales;
#pragma unroll
    for (int k = 0; k < SCALES_PER_THREAD; ++k) {
      int i = k * THREADS + thread;
      u32 low = codes_ahead[k].x, high = codes_ahead[k].y;
      if (i < X_SCALES) {
        // Codes of activations are above 0 (fp8_scale_code), so a shift decodes them.
        to[2 * i] = {as_float((low & 255u) << 23), as_float((low >> 8 & 255u) << 23),
                     as_float((low >> 16 & 255u) << 23), as_float(low >> 24 << 23)};
        to[2 * i + 1] = {as_float((high & 255u) << 23), as_float((high >> 8 & 255u) << 23),
                         as_float((high >> 16 & 255u) << 23), as_float(high >> 24 << 23)};
      }
    }
    cp_async_wait<0>();
    fence_async();
  };
  await_turn(shared, norm_part);
  if constexpr (PROLOGUE != NO_PROLOGUE) {
    XBuffer x = x_buffer(shared, 0);
    quantize_input(p, p.x[s], shared, [&](int group, int row, int quarter, uint2 words, u32 code) {
      *(uint2*)(x.codes + codes_offset(group, row, quarter)) = words;
      if (quarter == 0) x.scales[group * 8 + row] = as_float(code << 23);
    });
    fence_async();
  } else {
    start_copies(0);
  }

#pragma unroll
  for (int i = 0; i < WEIGHT_SCALES; ++i)  // read by the same warp, behind a barrier
    if (i * 32 + lane < PER_PART) w_scales[i * 32 + lane] = w_scale[i];

  // d: of BATCH groups from BATCH * batch.
  auto start_batch = [&](float(&d)[BATCH][4], const u8* codes, int batch) {
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      int g = batch * BATCH + i;
      if (g < PER_PART) wgmma_e4m3(d[i], a[g].x, a[g].y, a[g].z, a[g].w, wgmma_descriptor(codes + g * 256));
    }
    wgmma_commit();
  };
  auto add_batch = [&](float(&acc)[4], float(&d)[BATCH][4], const float* scales, int batch) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      int g = batch * BATCH + i;
      if (g >= PER_PART) continue;
      settle(d[i]);
      float2 x = *(const float2*)(scales + g * 8);
      float w = w_scales[g], even = w * x.x, odd = w * x.y;
      acc[0] = fmaf(d[i][0], even, acc[0]);
      acc[1] = fmaf(d[i][1], odd, acc[1]);
      acc[2] = fmaf(d[i][2], even, acc[2]);
      acc[3] = fmaf(d[i][3], odd, acc[3]);
    }
  };

#pragma unroll 1
  for (int pass = 0; pass < PASSES; ++pass) {
    if (PROLOGUE == NO_PROLOGUE) finish_copies(pass);
    sync_block();  // also: the last pass's activations and sums are read
    if (pass + 1 < PASSES) start_copies(pass + 1);
    XBuffer x = x_buffer(shared, pass % X_BUFFERS);
#pragma unroll 1
    for (int j = 0; j < ROW_TILES; ++j) {
      int row_tile = pass * ROW_TILES + j;
      if (PASSES * ROW_TILES > 1 && row_tile * 8 >= p.rows) break;
      const u8* codes = x.codes + (j * SLICE + first) * 256;
      const float* scales = x.scales + (j * SLICE + first) * 8 + scales_offset();
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[2][BATCH][4];
      start_batch(d[0], codes, 0);
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        if (batch + 1 < BATCHES) {
          start_batch(d[(batch + 1) & 1], codes, batch + 1);
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        add_batch(acc, d[batch & 1], scales, batch);
      }
      if constexpr (CLUSTER > 1 && PASSES == 1) {  // straight to the blocks that finish the outputs
        u64* inbox = (u64*)(shared + INBOX_AT);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int its_row = j * 8 + 2 * (lane & 3) + (i & 1), item = its_row * 16 + tile * 4 + (i >> 1) * 2 + (lane >> 4);
          float* to = (float*)(shared + MAIL_AT) + ((b.rank * WARPGROUPS + part) * SHARE + item % SHARE) * 4;
          if (its_row < p.rows) cluster_store(to + (lane >> 2 & 3), item / SHARE, acc[i], inbox);
        }
      } else {
        store_accumulators((float*)(shared + SUMS_AT) + (part * ROW_TILES + j) * 8 * STRIDE + tile * 16, STRIDE, acc);
      }
    }
    if constexpr (CLUSTER > 1 && PASSES == 1) {
      await_mail<FP8>(b, p, p.rows);
    } else {
      sync_block();
      finish_pass<FP8>(b, p, pass);
    }
  }
}
