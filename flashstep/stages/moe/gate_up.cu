// Gate and up products of the chosen experts and of the shared one for more than 8 rows, SwiGLU and fp8 quantization of
// the result. Persistent: one block per multiprocessor, one warp that copies, WARPGROUPS that multiply.
//
// A tile is 64 weight rows for each warpgroup: 32 gate rows and the 32 up rows of the same columns, interleaved so that
// a thread holds both (`cuda.py` packs). Its 32 columns of h are one fp8 group.
// The shared expert's weights are known before the routing: every block starts with its part of them, copied while
// the kernel before this one still runs.
#include "moe/experts.cuh"

typedef Piece<true, PIECE> RoutedPiece;
typedef Piece<false, SHARED_PIECE> SharedPiece;

constexpr int STEPS = HIDDEN / PIECE / PIECES;  // stages of a tile
constexpr int SHARED_STEPS = HIDDEN / SHARED_PIECE / PIECES;
constexpr int TILES = INNER / 32 / WARPGROUPS;  // of an expert
constexpr int OPERAND = 9 * HIDDEN;             // bytes of an operand tile
constexpr int OPERANDS = 2;                     // held in shared memory
constexpr int SLOT_BYTES = PIECES * (RoutedPiece::BYTES > SharedPiece::BYTES ? RoutedPiece::BYTES : SharedPiece::BYTES);
constexpr int STAGE_BYTES = WARPGROUPS * SLOT_BYTES;
static_assert(STEPS * PIECES * PIECE == HIDDEN && SHARED_STEPS * PIECES * SHARED_PIECE == HIDDEN, "whole stages");
static_assert(TILES * WARPGROUPS * 32 == INNER, "whole tiles");

struct Shared {
  u64 full[STAGES], empty[STAGES];
  u64 operand_full[OPERANDS], operand_empty[OPERANDS];
  float amax[WARPGROUPS][2][4][8];  // of h, by warp and row; used alternately
  int flag[WARPGROUPS];
  alignas(128) u8 operands[OPERANDS][OPERAND];
  alignas(128) u8 ring[STAGES][STAGE_BYTES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "cuda.py asks for too little shared memory");

// Where the block stands in its list of products.
struct Range { int begin, end; };

struct Work {
  Split shared, routed;
  int shared_pairs, pairs;
  METHOD Work(int shared_pairs, int pairs, int grid)
      : shared(Split::even(shared_pairs * TILES * SHARED_STEPS, grid)),
        routed(Split::balanced(pairs * TILES * STEPS, grid, shared_pairs * TILES * SHARED_STEPS)),
        shared_pairs(shared_pairs), pairs(pairs) {}
  template <bool FP4> METHOD const Split& split() const { if constexpr (FP4) return routed; else return shared; }
  template <bool FP4> METHOD Range range(int block) const {
    const Split& s = split<FP4>();
    return s.units ? Range{s.begin(block), s.begin(block + 1)} : Range{0, 0};
  }
};

DEVICE int shared_pairs(const GateUp& p) { return (p.rows + 7) / 8; }

// ---- the copying warp -------------------------------------------------------------------------------------------

struct Producer {
  const GateUp& p;
  Shared& s;
  Cursor cursor;
  u64 policy;
  int pair = -1, operand = -1;  // the pair whose operand tile was copied last, and how many were before
  int expert = 0;

  // The weights of stage `unit`. `expert`: of a routed pair.
  template <bool FP4> METHOD void weights(int unit) {
    typedef Piece<FP4, FP4 ? PIECE : SHARED_PIECE> P;
    constexpr int N = FP4 ? STEPS : SHARED_STEPS;
    constexpr u32 BYTES = PIECES * P::BYTES;
    int tile = unit / N, step = unit % N;
    const u8* from = FP4 ? p.routed + (i64)expert * (TILES * WARPGROUPS * STEPS * BYTES) : p.shared_expert;
    barrier_wait(&s.empty[cursor.stage], cursor.parity ^ 1);
    barrier_expect(&s.full[cursor.stage], WARPGROUPS * BYTES);
#pragma unroll
    for (int wg = 0; wg < WARPGROUPS; wg++) {
      const u8* piece = from + (i64)(((tile % TILES) * WARPGROUPS + wg) * N + step) * BYTES;
      u8* to = s.ring[cursor.stage] + wg * SLOT_BYTES;
      // Every row tile reads the shared weights again: those stay in L2 as far as they can.
      if (FP4) bulk_copy(to, piece, BYTES, &s.full[cursor.stage], policy);
      else bulk_copy(to, piece, BYTES, &s.full[cursor.stage]);
    }
    cursor.advance();
  }

  // The operand tile of the unit's pair, if it is another than the last one's.
  template <bool FP4> METHOD void operands(int unit, int shared_pairs) {
    int routed_pair = unit / ((FP4 ? STEPS : SHARED_STEPS) * TILES);
    int next = FP4 ? shared_pairs + routed_pair : routed_pair;
    if (next == pair) return;
    pair = next;
    if (FP4) expert = load_l2(p.list + 4 + routed_pair);
    ++operand;
    int buffer = operand & 1;
    barrier_wait(&s.operand_empty[buffer], ((operand >> 1) & 1) ^ 1);
    barrier_expect(&s.operand_full[buffer], OPERAND);
    bulk_copy(s.operands[buffer], p.operands + (i64)pair * OPERAND, OPERAND, &s.operand_full[buffer]);
  }
};

// ---- the multiplying warps --------------------------------------------------------------------------------------

struct Consumer {
  const GateUp& p;
  Shared& s;
  const Work& work;
  Cursor cursor;
  int warpgroup, warp, lane;
  int pair = -1, operand = -1;
  int finished = 0;

  METHOD void release_operand() {
    if (operand >= 0) {
      sync_warp();
      if (lane == 0) barrier_arrive(&s.operand_empty[operand & 1]);
    }
  }

  template <bool FP4> METHOD void run() {
    typedef Piece<FP4, FP4 ? PIECE : SHARED_PIECE> P;
    constexpr int N = FP4 ? STEPS : SHARED_STEPS, COLUMNS = FP4 ? PIECE : SHARED_PIECE;
    Range range = work.range<FP4>(blockIdx.x);
    int tile = range.begin / N, step = range.begin % N, first = step;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int unit = range.begin; unit < range.end; unit++) {
      int next = tile / TILES + (FP4 ? work.shared_pairs : 0);
      if (next != pair) {
        release_operand();
        pair = next, ++operand;
        barrier_wait(&s.operand_full[operand & 1], (operand >> 1) & 1);
      }
      const u8* rows = s.operands[operand & 1];
      const u8* codes = rows + step * (PIECES * COLUMNS * 8);
      const float* scales = (const float*)(rows + 8 * HIDDEN) + step * (PIECES * COLUMNS / 4);
      barrier_wait(&s.full[cursor.stage], cursor.parity);
      const u8* piece = s.ring[cursor.stage] + warpgroup * SLOT_BYTES;
      product<FP4, COLUMNS, COLUMNS / 32, PIECES>(acc, piece, codes, scales, warp, lane);
      sync_warp();
      if (lane == 0) barrier_arrive(&s.empty[cursor.stage]);
      cursor.advance();
      if (++step == N || unit + 1 == range.end) {
        finish<FP4>(acc, tile, first > 0, step < N);
        acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
        if (step == N) step = 0, tile++;
        first = step;
      }
    }
  }

  // The tile's sums are complete in this block (or are completed from other blocks' parts): h.
  template <bool FP4> METHOD void finish(float (&acc)[4], int tile, bool begun_before, bool ends_later) {
    constexpr int N = FP4 ? STEPS : SHARED_STEPS;
    int thread = threadIdx.x & 127;
    if (begun_before || ends_later) {
      const Split& split = work.split<FP4>();
      Sharing sharing{split.owner(tile * N), split.owner(tile * N + N - 1), nullptr};
      sharing.arrivals = p.arrivals + ((FP4 ? gridDim.x : 0) + sharing.first) * WARPGROUPS + warpgroup;
      float* partial = p.partial + (FP4 ? gridDim.x * (2 * WARPGROUPS * 512) : 0) + warpgroup * 512 + thread * 4;
      auto place = [&](int block) { return (float4*)(partial + partial_slot(sharing, block) * (WARPGROUPS * 512)); };
      int me = blockIdx.x;
      if (!last_to_come(sharing, &s.flag[warpgroup], 1 + warpgroup,
                        [&] { *place(me) = make_float4(acc[0], acc[1], acc[2], acc[3]); }))
        return;
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int block = sharing.first; block <= sharing.last; block++) {
        float4 part = make_float4(acc[0], acc[1], acc[2], acc[3]);
        if (block != me) part = load_l2(place(block));
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      acc[0] = total.x, acc[1] = total.y, acc[2] = total.z, acc[3] = total.w;
    }
    constexpr float FACTOR = FP4 ? FP4_FACTOR : 1.0f;
    int h_pair = tile / TILES + (FP4 ? work.shared_pairs : 0), group = (tile % TILES) * WARPGROUPS + warpgroup;
    int row = (lane & 3) * 2;  // and row + 1
    float2 weight = make_float2(1.0f, 1.0f);
    if constexpr (FP4) weight = load_l2((const float2*)(p.pair_weights + h_pair * 8 + row));
    float h[2];
#pragma unroll
    for (int i = 0; i < 2; i++) h[i] = swiglu(acc[i] * FACTOR, acc[2 + i] * FACTOR, i ? weight.y : weight.x);
    float amax[2] = {fabsf(h[0]), fabsf(h[1])};
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) {
      amax[0] = fmaxf(amax[0], shuffle_xor(amax[0], m));
      amax[1] = fmaxf(amax[1], shuffle_xor(amax[1], m));
    }
    float(*shared_amax)[8] = s.amax[warpgroup][finished++ & 1];
    if (lane < 4) *(float2*)&shared_amax[warp][row] = make_float2(amax[0], amax[1]);
    sync_some(1 + warpgroup, 128);
    u8* tile_h = p.h + (i64)h_pair * (9 * INNER);
    int column = group * 32 + warp * 8 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = shared_amax[0][row + i];
#pragma unroll
      for (int w = 1; w < 4; w++) most = fmaxf(most, shared_amax[w][row + i]);
      u32 code = fp8_scale_code(most);
      float scaled = h[i] * ue8m0_inverse(code);
      tile_h[((column >> 4) * 8 + row + i) * 16 + (column & 15)] = (u8)f32x2_to_e4m3x2(scaled, 0.0f);
      if (warp == 0 && lane < 4)  // down adds products of fp4 and fp8 weights: what the fp4 ones lack is in their h
        ((float*)(tile_h + 8 * INNER))[group * 8 + row + i] = ue8m0_to_f32(code);
    }
  }
};

KERNEL(gate_up, GateUp, THREADS, 1) {
  Shared& s = *(Shared*)shared_memory();
  int tid = threadIdx.x, warp = warp_id(), lane = lane_id();
  bool copies = warp == WARPGROUPS * 4 && lane == 0;
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], WARPGROUPS * 4);
    }
    for (int i = 0; i < OPERANDS; i++) {
      barrier_init(&s.operand_full[i], 1);
      barrier_init(&s.operand_empty[i], WARPGROUPS * 4);
    }
    barrier_init_fence();
  }
  sync_block();
  const int shared = shared_pairs(p);
  Producer producer{p, s, {}, evict_first_policy()};
  Range early = Work(shared, 0, gridDim.x).range<false>(blockIdx.x);
  const int ahead = min(early.end - early.begin, STAGES);
  if (copies)
    for (int i = 0; i < ahead; i++) producer.weights<false>(early.begin + i);
  wait_for_dependencies();
  int pairs = load_l2(p.list);
  if (tid == 0) launch_dependents();
  const Work work(shared, pairs, gridDim.x);
  if (copies) {
    Range range = work.range<true>(blockIdx.x);
    for (int i = 0; i < ahead; i++) producer.operands<false>(early.begin + i, shared);
    for (int unit = early.begin + ahead; unit < early.end; unit++) {
      producer.operands<false>(unit, shared);
      producer.weights<false>(unit);
    }
    for (int unit = range.begin; unit < range.end; unit++) {
      producer.operands<true>(unit, shared);
      producer.weights<true>(unit);
    }
  } else if (tid < CONSUMERS) {
    Consumer consumer{p, s, work, {}, warp >> 2, warp & 3, lane};
    consumer.run<false>();
    consumer.run<true>();
  }
}
