// The boundary between two sublayers in one kernel: sum over ranks, expansion into the residual copies, Engram,
// taps for the draft, collapse, norm, quantization (reference.py; the order of model.py).
//
// A cluster of CLUSTER blocks works on a row, each on HIDDEN / CLUSTER columns; a thread holds PIECES x 4 columns of
// every copy in registers from the first load to the last store. What needs whole rows (sums of squares, the Engram's
// products) is exchanged through distributed shared memory. With more rows than clusters, a cluster takes ROWS of them
// one after another. For each row one more warp adds the slices of the mixes and runs Sinkhorn on them, all at once
// and, where it may, before the wait: that is the longest chain of latencies here.
//
// With COPIED, what a cluster's rows need of the stream and of the sublayer's output comes by bulk copies into shared
// memory, all rows at once, so that only the first one waits for it.
//
// Where the rows come from is compiled in (SOURCE): the embedding, a sublayer's output, or main_proj's output (MAIN:
// no copies, sum and norm only). What is written is what has a pointer.
//
// Compiled with HIDDEN, HC, THREADS, SHARED_BYTES, CLUSTER, PIECES, ROWS, COPIED, WORLD, SOURCE, ENGRAM, SLICES,
// MIXES_EARLY, SINKHORN_ITERATIONS, HC_EPS, NORM_EPS, TAP_COLUMNS.
#include "common.cuh"

static_assert(HC == 4, "the mixing warp keeps 4 x 4 coefficients in lanes of four");

constexpr int FROM_EMBEDDING = 0, FROM_SUBLAYER = 1, FROM_MAIN = 2;
constexpr int COLUMNS = HIDDEN / CLUSTER;
constexpr int WORKERS = COLUMNS / (4 * PIECES);  // threads that hold columns; piece p of thread t: (p WORKERS + t) * 4
constexpr int WORKER_WARPS = (WORKERS + 31) / 32;
constexpr int COPIES = SOURCE == FROM_MAIN ? 1 : HC;
constexpr int OUTPUTS = (2 + HC) * HC;
constexpr int RECORD = 28;
static_assert(HIDDEN % (32 * CLUSTER) == 0, "a block holds whole scale groups");
static_assert(COLUMNS % (4 * PIECES) == 0 && WORKERS % 8 == 0, "the 8 threads of a scale group are in one warp");
static_assert(THREADS == 32 * (WORKER_WARPS + (SOURCE == FROM_SUBLAYER ? ROWS : 0)), "a warp for the mixes of a row");

constexpr int SLOTS = CLUSTER * WORKER_WARPS;  // parts of a sum over a row
// 64 registers a thread, so that kernels before and behind find room, and 128 where the Engram needs them.
constexpr int BLOCKS_PER_SM = THREADS <= (ENGRAM ? 256 : 512) ? (ENGRAM ? 512 : 1024) / THREADS : 1;

// Copied rows, whose exchanges need not wait for each other, are normed when the next row's sums are on their way.
constexpr bool DEFERRED = COPIED && !ENGRAM;
// Exchanges take turns. A block is at most one ahead of another, or two where it waits for them one later.
constexpr int TURNS = DEFERRED ? 4 : 2;

struct Coefficients { float pre[HC], post[HC], comb[HC][HC]; };
struct Shared {
  alignas(16) float sums[TURNS][ENGRAM ? 3 * HC : 1][SLOTS];
  alignas(8) u64 arrived[TURNS];                          // what other blocks add to the sums
  u64 ready[ROWS];                                        // the coefficients of a row
  u64 copied[ROWS];                                       // its copies
  Coefficients coefficients[ROWS];
};
constexpr int COPY_BYTES = COPIED ? COLUMNS * (2 * HC + 4 * WORLD) : 0;  // of a row: its stream, then the slabs
constexpr int COPIES_AT = (sizeof(Shared) + 15) / 16 * 16;
static_assert(COPIES_AT + ROWS * COPY_BYTES <= SHARED_BYTES, "what the launch asks for");
static_assert(!COPIED || SOURCE == FROM_SUBLAYER, "other sources are not copied");

// Wait until every rank's slab of the row is in this rank's mailbox: at one process per device, when the kernel that
// wrote them is complete.
DEVICE void await_partials() { wait_for_dependencies(); }

DEVICE float sigmoid(float x) { return divide_fast(1.0f, 1.0f + exp_accurate(-x)); }

struct Four { float v[4]; };
DEVICE Four unpack(uint2 pairs) {
  return Four{{bf16x2_low(pairs.x), bf16x2_high(pairs.x), bf16x2_low(pairs.y), bf16x2_high(pairs.y)}};
}
DEVICE uint2 pack(const Four& f) {
  return make_uint2(f32x2_to_bf16x2(f.v[0], f.v[1]), f32x2_to_bf16x2(f.v[2], f.v[3]));
}

// One warp: the slices of a row in order, then pre, post and comb.
//
// comb is kept as K_ij / (r_i c_j). In every four lanes, lane i holds row i and column i of K, its own r_i and c_i and
// their reciprocals, and reads those of its neighbours; element m of its row (column) stands in column (row) i ^ m.
// Dividing column j by its sum plus eps makes c_j of sum_i K_ij / r_i + eps c_j.
DEVICE void mixing(const Boundary& p, int row, Coefficients& to) {
  int lane = lane_id(), i = lane & 3;
  int output = lane < OUTPUTS ? lane : OUTPUTS;
  float base = lane < OUTPUTS ? p.mix_base[lane] : 0.0f;
  float scale = p.mix_scale[lane < HC ? 0 : lane < 2 * HC ? 1 : 2];
  if (!MIXES_EARLY) wait_for_dependencies();
  const float* record = p.mixes + (i64)row * (SLICES * RECORD) + output;
  float parts[SLICES];
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) parts[slice] = load_l2(record + slice * RECORD);
  bool active = p.row_slot == nullptr || load_l2(p.row_slot + row) >= 0;
  float total = 0.0f;
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) total += parts[slice];
  if (!active) total = 0.0f;
  float squares = shuffle(total, OUTPUTS);
  float z = fmaf(total * rsqrtf(squares * (1.0f / (HC * HIDDEN)) + NORM_EPS), scale, base);
  float gate = sigmoid(z);
  if (lane < HC) to.pre[lane] = gate + HC_EPS;
  if (HC <= lane && lane < 2 * HC) to.post[lane - HC] = 2.0f * gate;

  float along[HC], across[HC];
#pragma unroll
  for (int m = 0; m < HC; ++m) along[m] = shuffle(z, 2 * HC + HC * i + (i ^ m));
  float top = fmaxf(fmaxf(along[0], along[1]), fmaxf(along[2], along[3]));
#pragma unroll
  for (int m = 0; m < HC; ++m) along[m] = exp_accurate(along[m] - top);
  float sum = (along[0] + along[1]) + (along[2] + along[3]);
#pragma unroll
  for (int m = 0; m < HC; ++m) along[m] = divide_fast(along[m], sum) + HC_EPS;
#pragma unroll
  for (int m = 0; m < HC; ++m) across[m] = shuffle_xor(along[m], m);
  float r = 1.0f, c = 1.0f, one_by_r = 1.0f, one_by_c = 1.0f;
  // What r_i (c_j) becomes of the other side's reciprocals: short from their arrival to the next quotient.
  auto step = [&](const float(&k)[HC], float other, float own) {
    float other1 = shuffle_xor(other, 1), other2 = shuffle_xor(other, 2), other3 = shuffle_xor(other, 3);
    float one = fmaf(k[1], other1, fmaf(k[0], other, HC_EPS * own)), two = fmaf(k[3], other3, k[2] * other2);
    return one + two;
  };
  c = step(across, one_by_r, c);
  one_by_c = divide_fast(1.0f, c);
#pragma unroll 1
  for (int iteration = 1; iteration < SINKHORN_ITERATIONS; ++iteration) {
    r = step(along, one_by_c, r);
    one_by_r = divide_fast(1.0f, r);
    float before = one_by_c;
    c = step(across, one_by_r, c);
    one_by_c = divide_fast(1.0f, c);
    // Mostly it has settled long before: another 17 such steps would move it by less than 2^-18.
    if (iteration % 3 == 0 && ballot(fabsf(one_by_c - before) > 1.1920929e-7f * one_by_c) == 0) break;
  }
#pragma unroll
  for (int m = 0; m < HC; ++m) {
    float v = one_by_r * along[m] * shuffle_xor(one_by_c, m);
    if (lane < HC) to.comb[i][i ^ m] = v;
  }
}

// Sums over the whole row of N values a thread holds: exchange number `turn` of the cluster. Threads without columns
// send zeros; each worker gets all sums. No fence: that would wait for the stores to global memory that go on meanwhile.
template <int N> DEVICE void send_sums(float (&values)[N], Shared& s, int turn, int rank) {
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = warp_sum(values[n]);
  float(*sums)[SLOTS] = s.sums[turn % TURNS];
  if constexpr (CLUSTER > 1) {
    u64* arrived = &s.arrived[turn % TURNS];
    if (threadIdx.x == 0) barrier_expect(arrived, N * SLOTS * 4);
    if (lane_id() < CLUSTER) {
#pragma unroll
      for (int n = 0; n < N; ++n) cluster_store(&sums[n][rank * WORKER_WARPS + warp_id()], lane_id(), values[n], arrived);
    }
  } else if (lane_id() == 0) {  // a launch without clusters has no such stores
#pragma unroll
    for (int n = 0; n < N; ++n) sums[n][warp_id()] = values[n];
  }
}
template <int N> DEVICE void receive_sums(float (&values)[N], Shared& s, int turn) {
  float(*sums)[SLOTS] = s.sums[turn % TURNS];
  if (CLUSTER > 1) barrier_wait(&s.arrived[turn % TURNS], turn / TURNS & 1);
  else sync_some(1, WORKER_WARPS * 32);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if constexpr (SLOTS % 4 == 0) {
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // four chains: a quarter of the latency
#pragma unroll
      for (int i = 0; i < SLOTS / 4; ++i) {
        float4 part = *(const float4*)&sums[n][4 * i];
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      values[n] = (total.x + total.y) + (total.z + total.w);
    } else {
      values[n] = sums[n][0];
#pragma unroll
      for (int i = 1; i < SLOTS; ++i) values[n] += sums[n][i];
    }
  }
}

// The largest of a scale group's magnitudes. All 8 threads of the group call it.
DEVICE float group_max(const Four& x) {
  float amax = fmaxf(fmaxf(fabsf(x.v[0]), fabsf(x.v[1])), fmaxf(fabsf(x.v[2]), fabsf(x.v[3])));
#pragma unroll
  for (int mask = 1; mask < 8; mask <<= 1) amax = fmaxf(amax, shuffle_xor(amax, mask));
  return amax;
}

// Four columns of a row as fp8 fragments: codes and, by one of the 8 threads of a group, its scale. `width` columns
// a row, of which the first here is `column`; `amax` of the group.
DEVICE void store_fp8(u8* codes, u8* scales, int row, int column, int width, const Four& x, float amax) {
  u32 scale = fp8_scale_code(amax);
  float inverse = ue8m0_inverse(scale);
  u32 low = f32x2_to_e4m3x2(x.v[0] * inverse, x.v[1] * inverse);
  u32 high = f32x2_to_e4m3x2(x.v[2] * inverse, x.v[3] * inverse);
  if (column >= 0 && column < width) {
    *(u32*)(codes + fragment_offset(row, column, width / 16)) = low | high << 16;
    if (column % 32 == 0) scales[((i64)(row >> 3) * (width / 32) + column / 32) * 8 + (row & 7)] = (u8)scale;
  }
}

// Partial sums of the ranks, in order, rounded to bf16: four columns from `from` + `column`, slabs `stride` apart.
struct Slabs { float4 part[WORLD]; };
template <bool IN_SHARED> DEVICE Slabs load_slabs(const float* from, i64 stride) {
  Slabs slabs;
#pragma unroll
  for (int peer = 0; peer < WORLD; ++peer) {
    const float4* at = (const float4*)(from + peer * stride);
    slabs.part[peer] = IN_SHARED ? *at : load_l2(at);
  }
  return slabs;
}
DEVICE uint2 add_slabs(const Slabs& slabs) {
  float4 sum = slabs.part[0];
#pragma unroll
  for (int peer = 1; peer < WORLD; ++peer)
    sum.x += slabs.part[peer].x, sum.y += slabs.part[peer].y, sum.z += slabs.part[peer].z, sum.w += slabs.part[peer].w;
  return pack(Four{{sum.x, sum.y, sum.z, sum.w}});
}

KERNEL(boundary, Boundary, THREADS, BLOCKS_PER_SM) {
  Shared& s = *(Shared*)shared_memory();
  launch_dependents();
  if (threadIdx.x < TURNS) barrier_init(&s.arrived[threadIdx.x], 1);
  if (threadIdx.x < ROWS) {
    barrier_init(&s.ready[threadIdx.x], 1);
    barrier_init(&s.copied[threadIdx.x], 1);
  }
  barrier_init_fence();
  if (CLUSTER > 1) cluster_arrive();
  else sync_block();
  int rank = (int)blockIdx.x % CLUSTER, first_row = (int)blockIdx.x / CLUSTER, clusters = (int)gridDim.x / CLUSTER;

  if (SOURCE == FROM_SUBLAYER && warp_id() >= WORKER_WARPS) {
    int m = warp_id() - WORKER_WARPS, row = first_row + m * clusters;
    if (row < p.rows) {
      mixing(p, row, s.coefficients[m]);
      sync_warp();
    }
    if (CLUSTER > 1) cluster_wait();  // for the barriers to be there; not before the coefficients
    if (row < p.rows && lane_id() == 0) barrier_arrive(&s.ready[m]);
    return;
  }
  if (CLUSTER > 1) cluster_wait();

  bool works = threadIdx.x < WORKERS;
  int column[PIECES];
#pragma unroll
  for (int c = 0; c < PIECES; ++c) column[c] = rank * COLUMNS + (c * WORKERS + (works ? (int)threadIdx.x : 0)) * 4;
  uint2 norm[PIECES];  // a weight: before the wait
#pragma unroll
  for (int c = 0; c < PIECES; ++c)
    norm[c] = p.norm_weight ? *(const uint2*)(p.norm_weight + column[c]) : make_uint2(0, 0);

  // The stream in front of the sublayer, its mixes and the Engram's products were complete before the sublayer's last
  // kernels began (MIXES_EARLY): they are read before the wait.
  if (!MIXES_EARLY) await_partials();
  auto copy_of = [&](int m) { return shared_memory() + COPIES_AT + m * COPY_BYTES; };
  auto copy_rows = [&](auto copy) {  // by one thread
    for (int m = 0, row = first_row; row < p.rows; ++m, row += clusters) copy(m, row);
  };
  auto copy_slabs = [&] {
    copy_rows([&](int m, int row) {
      for (int peer = 0; peer < WORLD; ++peer)
        bulk_copy(copy_of(m) + (2 * HC + 4 * peer) * COLUMNS, p.mailbox + ((i64)peer * p.rows + row) * HIDDEN + rank * COLUMNS,
                  4 * COLUMNS, &s.copied[m]);
    });
  };
  if (COPIED && threadIdx.x == 0) {
    copy_rows([&](int m, int row) {
      barrier_expect(&s.copied[m], COPY_BYTES);
      for (int j = 0; j < HC; ++j)
        bulk_copy(copy_of(m) + 2 * j * COLUMNS, p.stream_in + ((i64)row * HC + j) * HIDDEN + rank * COLUMNS, 2 * COLUMNS,
                  &s.copied[m]);
    });
    if (!MIXES_EARLY) copy_slabs();
  }

  struct Unfinished {  // a row whose squares are on their way
    int row, turn;
    Four x[PIECES];      // times the weights of the norm
    float amax[PIECES];  // of a group of those: what follows, a factor and rounding, changes no order
  } unfinished;
  auto finish = [&](Unfinished& u) {
    float squares[1];
    receive_sums(squares, s, u.turn);
    float inverse = rsqrtf(squares[0] * (1.0f / HIDDEN) + NORM_EPS);
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) u.x[c].v[e] *= inverse;
      uint2 rounded = pack(u.x[c]);
      if (works && p.x_bf16) *(uint2*)((u8*)p.x_bf16 + fragment_offset(u.row, column[c] * 2, HIDDEN / 8)) = rounded;
      if (p.x_codes)
        store_fp8(p.x_codes, p.x_scales, u.row, works ? column[c] : -1, HIDDEN, unpack(rounded),
                  round_bf16(u.amax[c] * inverse));
    }
  };

#pragma unroll 1
  for (int m = 0, row = first_row, turn = 0; row < p.rows; ++m, row += clusters) {
    bool active = p.row_slot == nullptr || load_l2(p.row_slot + row) >= 0;
    uint2 before[PIECES][HC], kv[PIECES][HC + 1];  // keys, then the value
    if (SOURCE == FROM_SUBLAYER && !COPIED)
#pragma unroll
      for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int j = 0; j < HC; ++j) {
          const bf16* from = p.stream_in + ((i64)row * HC + j) * HIDDEN + column[c];
          before[c][j] = works ? load_l2((const uint2*)from) : make_uint2(0, 0);
        }
    if constexpr (ENGRAM) {
      const i64 stride = (i64)p.rows * (HC + 1) * HIDDEN;
      const float* parts = p.engram_kv + (i64)row * (HC + 1) * HIDDEN;
      Slabs slabs[PIECES][HC + 1];  // all asked for before any is added
#pragma unroll
      for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int j = 0; j <= HC; ++j) slabs[c][j] = load_slabs<false>(parts + j * HIDDEN + column[c], stride);
      if (threadIdx.x == 0 && row + clusters < p.rows)  // more than L2 holds of all rows: the next row's, from memory
        for (int i = 0; i < WORLD * (HC + 1); ++i)
          prefetch_l2(parts + (i64)clusters * (HC + 1) * HIDDEN + i / (HC + 1) * stride + i % (HC + 1) * HIDDEN + rank * COLUMNS,
                      4 * COLUMNS);
#pragma unroll
      for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int j = 0; j <= HC; ++j) kv[c][j] = add_slabs(slabs[c][j]);
    }
    uint2 query_weight[PIECES][HC], key_weight[PIECES][HC];
    if (ENGRAM)
#pragma unroll
      for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int j = 0; j < HC; ++j) {
          query_weight[c][j] = *(const uint2*)(p.query_weight + j * HIDDEN + column[c]);
          key_weight[c][j] = *(const uint2*)(p.key_weight + j * HIDDEN + column[c]);
        }
    if (MIXES_EARLY && m == 0) {
      await_partials();
      if (COPIED && threadIdx.x == 0) copy_slabs();
    }

    Four stream[PIECES][COPIES];
    if (SOURCE == FROM_EMBEDDING) {
      i64 token = load_l2(p.row_token + row);
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        Four x = unpack(active ? *(const uint2*)(p.embedding + token * HIDDEN + column[c]) : make_uint2(0, 0));
#pragma unroll
        for (int j = 0; j < COPIES; ++j) stream[c][j] = x;
      }
    } else {
      Slabs slabs[PIECES];
      if constexpr (COPIED) {
        barrier_wait(&s.copied[m], 0);
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
          const u8* from = copy_of(m) + (column[c] - rank * COLUMNS) * 2;
#pragma unroll
          for (int j = 0; j < HC; ++j) before[c][j] = works ? *(const uint2*)(from + 2 * j * COLUMNS) : make_uint2(0, 0);
          slabs[c] = load_slabs<true>((const float*)(copy_of(m) + 2 * HC * COLUMNS) + column[c] - rank * COLUMNS, COLUMNS);
        }
      } else {
#pragma unroll
        for (int c = 0; c < PIECES; ++c)
          slabs[c] = load_slabs<false>(p.mailbox + (i64)row * HIDDEN + column[c], (i64)p.rows * HIDDEN);
      }
      if (SOURCE == FROM_SUBLAYER) barrier_wait(&s.ready[m], 0);
      const Coefficients& coefficients = s.coefficients[m];
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        if (SOURCE == FROM_SUBLAYER)  // the part that does not need the sublayer's output, while that is on its way
#pragma unroll
          for (int k = 0; k < COPIES; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float x = 0.0f;
#pragma unroll
              for (int j = 0; j < HC; ++j) {
                uint2 old = active ? before[c][j] : make_uint2(0, 0);
                x = fmaf(coefficients.comb[j][k], unpack(old).v[e], x);
              }
              stream[c][k].v[e] = x;
            }
      }
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        Four y = unpack(active && works ? add_slabs(slabs[c]) : make_uint2(0, 0));
        if (SOURCE == FROM_MAIN) {
          stream[c][0] = y;
          continue;
        }
#pragma unroll
        for (int k = 0; k < COPIES; ++k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) stream[c][k].v[e] = fmaf(coefficients.post[k], y.v[e], stream[c][k].v[e]);
          stream[c][k] = unpack(pack(stream[c][k]));
        }
      }
    }

    if constexpr (ENGRAM) {
      float sums[3 * HC];  // of each copy: its product with the key, its squares, the key's squares
#pragma unroll
      for (int n = 0; n < 3 * HC; ++n) sums[n] = 0.0f;
#pragma unroll
      for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int j = 0; j < HC; ++j) {
          Four q = unpack(query_weight[c][j]), k = unpack(key_weight[c][j]);
          Four key = unpack(active && works ? kv[c][j] : make_uint2(0, 0)), &x = stream[c][j];
          if (works)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              sums[3 * j] = fmaf(x.v[e] * (q.v[e] * k.v[e]), key.v[e], sums[3 * j]);
              sums[3 * j + 1] = fmaf(x.v[e], x.v[e], sums[3 * j + 1]);
              sums[3 * j + 2] = fmaf(key.v[e], key.v[e], sums[3 * j + 2]);
            }
        }
      send_sums(sums, s, turn, rank);
      receive_sums(sums, s, turn++);
#pragma unroll
      for (int j = 0; j < HC; ++j) {
        // Two roots, not one of the product: the product of two tiny means leaves float32.
        float x_norm = rsqrtf(sums[3 * j + 1] * (1.0f / HIDDEN) + NORM_EPS);
        float key_norm = rsqrtf(sums[3 * j + 2] * (1.0f / HIDDEN) + NORM_EPS);
        float dot = sums[3 * j] * x_norm * key_norm * rsqrtf((float)HIDDEN);
        float root = sqrtf(fmaxf(fabsf(dot), 1e-6f));
        float gate = dot == 0.0f ? 0.5f : sigmoid(dot < 0.0f ? -root : root);
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
          Four x, value = unpack(active && works ? kv[c][HC] : make_uint2(0, 0));
#pragma unroll
          for (int e = 0; e < 4; ++e) x.v[e] = fmaf(gate, value.v[e], stream[c][j].v[e]);
          stream[c][j] = unpack(pack(x));
        }
      }
    }

    if (SOURCE != FROM_MAIN && p.stream_out && works)
#pragma unroll
      for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int j = 0; j < COPIES; ++j)
          *(uint2*)(p.stream_out + ((i64)row * HC + j) * HIDDEN + column[c]) = pack(stream[c][j]);

    if (SOURCE != FROM_MAIN && p.taps)
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        const Four &x0 = stream[c][0], &x1 = stream[c][1 % COPIES];
        const Four &x2 = stream[c][2 % COPIES], &x3 = stream[c][3 % COPIES];
        Four mean;
#pragma unroll
        for (int e = 0; e < 4; ++e) mean.v[e] = ((x0.v[e] + x1.v[e]) + (x2.v[e] + x3.v[e])) * 0.25f;
        uint2 rounded = pack(mean);
        int place = p.tap_column + column[c];  // in the concatenation of the taps
        if (works) *(uint2*)(p.taps + (i64)row * TAP_COLUMNS + place) = rounded;
        if (p.tap_codes)
          store_fp8(p.tap_codes, p.tap_scales, row, works ? place - p.tap_begin : -1, p.tap_end - p.tap_begin,
                    unpack(rounded), group_max(unpack(rounded)));
      }

    if (p.norm_weight == nullptr) continue;

    Four x[PIECES];
    float squares[1] = {0.0f};
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      if (SOURCE == FROM_SUBLAYER) {
        const float* pre = s.coefficients[m].pre;
        Four sum;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum.v[e] = pre[0] * stream[c][0].v[e];
#pragma unroll
          for (int j = 1; j < COPIES; ++j) sum.v[e] = fmaf(pre[j], stream[c][j].v[e], sum.v[e]);
        }
        x[c] = unpack(pack(sum));
      } else {
        x[c] = stream[c][0];  // the first collapse takes copy 0
      }
      if (works) {
        if (p.hidden_out) *(uint2*)(p.hidden_out + (i64)row * HIDDEN + column[c]) = pack(x[c]);
#pragma unroll
        for (int e = 0; e < 4; ++e) squares[0] = fmaf(x[c].v[e], x[c].v[e], squares[0]);
      }
    }
    send_sums(squares, s, turn, rank);
    if (DEFERRED && m > 0) finish(unfinished);
    unfinished.row = row, unfinished.turn = turn++;
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      Four w = unpack(norm[c]);
#pragma unroll
      for (int e = 0; e < 4; ++e) unfinished.x[c].v[e] = x[c].v[e] * w.v[e];
      unfinished.amax[c] = p.x_codes ? group_max(unfinished.x[c]) : 0.0f;
    }
    if (!DEFERRED) finish(unfinished);
  }
  if (DEFERRED && p.norm_weight) finish(unfinished);
}
