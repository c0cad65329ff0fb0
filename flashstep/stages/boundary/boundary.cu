// The boundary between two sublayers in one kernel: sum over ranks, expansion into the residual copies, Engram,
// taps for the draft, collapse, norm, quantization (reference.py; the order of model.py).
//
// A cluster of CLUSTER blocks works on one row, each on HIDDEN / CLUSTER columns; a thread holds PIECES x 4 columns
// of every copy in registers from the first load to the last store. What needs whole rows (sums of squares, the
// Engram's products) is exchanged through distributed shared memory. Meanwhile one more warp adds the slices of the
// mixes and runs Sinkhorn on them.
//
// Where the rows come from is compiled in (SOURCE): the embedding, a sublayer's output, or main_proj's output (MAIN:
// no copies, sum and norm only). What is written is what has a pointer.
//
// Compiled with HIDDEN, HC, THREADS, SHARED_BYTES, CLUSTER, PIECES, WORLD, SOURCE, ENGRAM, SLICES, MIXES_EARLY,
// SINKHORN_ITERATIONS, HC_EPS, NORM_EPS, TAP_COLUMNS.
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
static_assert(THREADS == 32 * (WORKER_WARPS + (SOURCE == FROM_SUBLAYER)), "one more warp for the mixes");

constexpr int EXCHANGED = ENGRAM ? 3 * HC : 1;  // sums exchanged at once, at most

struct Shared {
  float pre[HC], post[HC], comb[HC][HC];
  float sums[2][EXCHANGED][CLUSTER * WORKER_WARPS];  // two exchanges: the Engram's and the norm's
};
static_assert(sizeof(Shared) == SHARED_BYTES, "what the launch asks for");

// Wait until every rank's slab of the row is in this rank's mailbox: at one process per device, when the kernel that
// wrote them is complete.
DEVICE void await_partials() { wait_for_dependencies(); }

// To about 2 units in the last place; the quotients of Sinkhorn are iterated 39 times in one chain of latencies.
DEVICE float divide_fast(float a, float b) {
#ifdef FLASHSTEP_EMULATE
  return a / b;
#else
  return __fdividef(a, b);
#endif
}
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
// comb is kept as r_i K_ij c_j. In every four lanes, lane i holds row i and column i of K, its own r_i and c_i, and
// reads those of its neighbours; element m of its row (column) stands in column (row) i ^ m.
DEVICE void mixing(const Boundary& p, int row, Shared& s) {
  int lane = lane_id(), i = lane & 3;
  int output = lane < OUTPUTS ? lane : OUTPUTS;
  float base = lane < OUTPUTS ? p.mix_base[lane] : 0.0f;
  float scale = p.mix_scale[lane < HC ? 0 : lane < 2 * HC ? 1 : 2];
  if (!MIXES_EARLY) wait_for_dependencies();
  const float* record = p.mixes + (i64)row * RECORD + output;
  float parts[SLICES];
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) parts[slice] = load_l2(record + (i64)slice * p.rows * RECORD);
  bool active = p.row_slot == nullptr || load_l2(p.row_slot + row) >= 0;
  float total = 0.0f;
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) total += parts[slice];
  if (!active) total = 0.0f;
  float squares = shuffle(total, OUTPUTS);
  float z = fmaf(total * rsqrtf(squares * (1.0f / (HC * HIDDEN)) + NORM_EPS), scale, base);
  float gate = sigmoid(z);
  if (lane < HC) s.pre[lane] = gate + HC_EPS;
  if (HC <= lane && lane < 2 * HC) s.post[lane - HC] = 2.0f * gate;

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
  float r = 1.0f, c = 1.0f;
#pragma unroll 1
  for (int iteration = 0; iteration < SINKHORN_ITERATIONS; ++iteration) {
    if (iteration > 0) {
      float c1 = shuffle_xor(c, 1), c2 = shuffle_xor(c, 2), c3 = shuffle_xor(c, 3);
      float by_row = fmaf(along[3], c3, fmaf(along[2], c2, fmaf(along[1], c1, along[0] * c)));
      r = divide_fast(r, fmaf(r, by_row, HC_EPS));
    }
    float r1 = shuffle_xor(r, 1), r2 = shuffle_xor(r, 2), r3 = shuffle_xor(r, 3);
    float by_column = fmaf(across[3], r3, fmaf(across[2], r2, fmaf(across[1], r1, across[0] * r)));
    c = divide_fast(c, fmaf(c, by_column, HC_EPS));
  }
#pragma unroll
  for (int m = 0; m < HC; ++m) {
    float v = r * along[m] * shuffle_xor(c, m);
    if (lane < HC) s.comb[i][i ^ m] = v;
  }
}

// Sums over the whole row of N values a thread holds, in one exchange of the cluster; each thread gets all of them.
// Threads without columns pass zeros. `sums` is used once in a kernel.
template <int N> DEVICE void row_sums(float (&values)[N], float (*sums)[CLUSTER * WORKER_WARPS], int rank) {
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = warp_sum(values[n]);
  if (warp_id() < WORKER_WARPS && lane_id() < CLUSTER) {
    int slot = rank * WORKER_WARPS + warp_id();
#pragma unroll
    for (int n = 0; n < N; ++n) *cluster_map(&sums[n][slot], lane_id()) = values[n];
  }
  if (CLUSTER > 1) cluster_sync();
  else sync_block();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // four chains: a quarter of the latency
#pragma unroll
    for (int i = 0; i < CLUSTER * WORKER_WARPS; ++i) parts[i & 3] += sums[n][i];
    values[n] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
}

// Four columns of a row as fp8 fragments: codes and, by one of the 8 threads of a group, its scale. `width` columns
// a row, of which the first here is `column`. All 8 threads of the group call it.
DEVICE void store_fp8(u8* codes, u8* scales, int row, int column, int width, const Four& x) {
  float amax = fmaxf(fmaxf(fabsf(x.v[0]), fabsf(x.v[1])), fmaxf(fabsf(x.v[2]), fabsf(x.v[3])));
#pragma unroll
  for (int mask = 1; mask < 8; mask <<= 1) amax = fmaxf(amax, shuffle_xor(amax, mask));
  u32 scale = fp8_scale_code(amax);
  float inverse = ue8m0_inverse(scale);
  u32 low = f32x2_to_e4m3x2(x.v[0] * inverse, x.v[1] * inverse), high = f32x2_to_e4m3x2(x.v[2] * inverse, x.v[3] * inverse);
  if (column >= 0 && column < width) {
    *(u32*)(codes + fragment_offset(row, column, width / 16)) = low | high << 16;
    if (column % 32 == 0) scales[((i64)(row >> 3) * (width / 32) + column / 32) * 8 + (row & 7)] = (u8)scale;
  }
}

KERNEL(boundary, Boundary, THREADS, 1) {
  Shared& s = *(Shared*)shared_memory();
  if (CLUSTER > 1) cluster_arrive();  // waited for before the first store into another block: it must have started
  launch_dependents();
  int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  bool works = threadIdx.x < WORKERS;
  int column[PIECES];
#pragma unroll
  for (int c = 0; c < PIECES; ++c) column[c] = rank * COLUMNS + (c * WORKERS + (works ? (int)threadIdx.x : 0)) * 4;

  // Weights, before the wait.
  uint2 norm[PIECES], query_weight[PIECES][HC], key_weight[PIECES][HC];
#pragma unroll
  for (int c = 0; c < PIECES; ++c) {
    norm[c] = p.norm_weight ? *(const uint2*)(p.norm_weight + column[c]) : make_uint2(0, 0);
    if (ENGRAM)
#pragma unroll
      for (int j = 0; j < HC; ++j) {
        query_weight[c][j] = *(const uint2*)(p.query_weight + j * HIDDEN + column[c]);
        key_weight[c][j] = *(const uint2*)(p.key_weight + j * HIDDEN + column[c]);
      }
  }

  // The stream in front of the sublayer and its mixes were complete before the sublayer's last kernel began: where
  // that kernel lets this one start only after its own wait (MIXES_EARLY), they are read before ours.
  if (SOURCE == FROM_SUBLAYER && warp_id() == WORKER_WARPS) mixing(p, row, s);
  if (!MIXES_EARLY) await_partials();
  uint2 before[PIECES][HC];
  if (SOURCE == FROM_SUBLAYER && works)
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
      for (int j = 0; j < HC; ++j)
        before[c][j] = load_l2((const uint2*)(p.stream_in + ((i64)row * HC + j) * HIDDEN + column[c]));
  if (MIXES_EARLY) await_partials();

  bool active = p.row_slot == nullptr || load_l2(p.row_slot + row) >= 0;
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
    float4 slabs[PIECES][WORLD];
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
      for (int peer = 0; peer < WORLD; ++peer)
        slabs[c][peer] = works ? load_l2((const float4*)(p.mailbox + ((i64)peer * p.rows + row) * HIDDEN + column[c]))
                               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    Four y[PIECES];
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      float4 sum = slabs[c][0];
#pragma unroll
      for (int peer = 1; peer < WORLD; ++peer)
        sum.x += slabs[c][peer].x, sum.y += slabs[c][peer].y, sum.z += slabs[c][peer].z, sum.w += slabs[c][peer].w;
      y[c] = unpack(active ? pack(Four{{sum.x, sum.y, sum.z, sum.w}}) : make_uint2(0, 0));
    }
    if (SOURCE == FROM_MAIN) {
#pragma unroll
      for (int c = 0; c < PIECES; ++c) stream[c][0] = y[c];
    } else {
      sync_block();  // the coefficients are in shared memory
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        Four old[HC];
#pragma unroll
        for (int j = 0; j < HC; ++j) old[j] = unpack(active && works ? before[c][j] : make_uint2(0, 0));
#pragma unroll
        for (int k = 0; k < COPIES; ++k) {
          Four x;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x.v[e] = s.post[k] * y[c].v[e];
#pragma unroll
            for (int j = 0; j < HC; ++j) x.v[e] = fmaf(s.comb[j][k], old[j].v[e], x.v[e]);
          }
          stream[c][k] = unpack(pack(x));
        }
      }
    }
  }
  if (CLUSTER > 1) cluster_wait();

  if (ENGRAM) {
    Four value[PIECES];
    float sums[3 * HC];  // of each copy: its product with the key, its squares, the key's squares
#pragma unroll
    for (int n = 0; n < 3 * HC; ++n) sums[n] = 0.0f;
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
      for (int j = 0; j <= HC; ++j) {  // the keys, then the value
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int peer = 0; peer < WORLD; ++peer) {
          float4 part = load_l2((const float4*)(p.engram_kv + (((i64)peer * p.rows + row) * (HC + 1) + j) * HIDDEN + column[c]));
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        Four kv = unpack(active && works ? pack(Four{{sum.x, sum.y, sum.z, sum.w}}) : make_uint2(0, 0));
        if (j == HC) {
          value[c] = kv;
        } else {
          Four q = unpack(query_weight[c][j % HC]), k = unpack(key_weight[c][j % HC]), &x = stream[c][j % COPIES];
          if (works)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              sums[3 * (j % HC)] = fmaf(x.v[e] * (q.v[e] * k.v[e]), kv.v[e], sums[3 * (j % HC)]);
              sums[3 * (j % HC) + 1] = fmaf(x.v[e], x.v[e], sums[3 * (j % HC) + 1]);
              sums[3 * (j % HC) + 2] = fmaf(kv.v[e], kv.v[e], sums[3 * (j % HC) + 2]);
            }
        }
      }
    row_sums(sums, s.sums[0], rank);
#pragma unroll
    for (int j = 0; j < COPIES; ++j) {
      // Two roots, not one of the product: the product of two tiny means leaves float32.
      float x_norm = rsqrtf(sums[3 * j + 1] * (1.0f / HIDDEN) + NORM_EPS);
      float key_norm = rsqrtf(sums[3 * j + 2] * (1.0f / HIDDEN) + NORM_EPS);
      float dot = sums[3 * j] * x_norm * key_norm * rsqrtf((float)HIDDEN);
      float root = sqrtf(fmaxf(fabsf(dot), 1e-6f));
      float gate = dot == 0.0f ? 0.5f : sigmoid(dot < 0.0f ? -root : root);
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        Four x;
#pragma unroll
        for (int e = 0; e < 4; ++e) x.v[e] = fmaf(gate, value[c].v[e], stream[c][j].v[e]);
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
      Four mean;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        mean.v[e] = ((stream[c][0].v[e] + stream[c][1 % COPIES].v[e]) + (stream[c][2 % COPIES].v[e] + stream[c][3 % COPIES].v[e])) * 0.25f;
      uint2 rounded = pack(mean);
      int place = p.tap_column + column[c];  // in the concatenation of the taps
      if (works) *(uint2*)(p.taps + (i64)row * TAP_COLUMNS + place) = rounded;
      if (p.tap_codes)
        store_fp8(p.tap_codes, p.tap_scales, row, works ? place - p.tap_begin : -1, p.tap_end - p.tap_begin, unpack(rounded));
    }

  if (p.norm_weight == nullptr) return;

  Four x[PIECES];
  float squares[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < PIECES; ++c) {
    if (SOURCE == FROM_SUBLAYER) {
      Four sum;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum.v[e] = s.pre[0] * stream[c][0].v[e];
#pragma unroll
        for (int j = 1; j < COPIES; ++j) sum.v[e] = fmaf(s.pre[j], stream[c][j].v[e], sum.v[e]);
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
  row_sums(squares, s.sums[1], rank);
  float inverse = rsqrtf(squares[0] * (1.0f / HIDDEN) + NORM_EPS);
#pragma unroll
  for (int c = 0; c < PIECES; ++c) {
    Four w = unpack(norm[c]), normed;
#pragma unroll
    for (int e = 0; e < 4; ++e) normed.v[e] = w.v[e] * x[c].v[e] * inverse;
    uint2 rounded = pack(normed);
    if (works && p.x_bf16) *(uint2*)((u8*)p.x_bf16 + fragment_offset(row, column[c] * 2, HIDDEN / 8)) = rounded;
    if (p.x_codes) store_fp8(p.x_codes, p.x_scales, row, works ? column[c] : -1, HIDDEN, unpack(rounded));
  }
}
