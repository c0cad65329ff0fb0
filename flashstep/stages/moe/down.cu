// Down products of the chosen experts and of the shared one for more than 8 rows, summed over the experts: this rank's
// part of the output, float32, written to the mailboxes of all ranks. Persistent, as gate_up.cu.
//
// A tile is 64 output columns for each warpgroup; its K runs over all pairs' h, the shared pairs first. A pair's sums
// are added to those of its rows in shared memory, pair after pair.
// The list of experts is complete before this kernel may start (gate_up.cu), so weights are copied at once; only h
// waits for the kernel before.
#include "moe/experts.cuh"

constexpr int H_COLUMNS = PIECE < INNER ? PIECE : INNER;  // of a routed piece that exist
typedef Piece<true, PIECE> RoutedPiece;
typedef Piece<false, SHARED_PIECE> SharedPiece;

constexpr int STEPS = (INNER + PIECE - 1) / PIECE / PIECES;  // stages of a pair
constexpr int SHARED_STEPS = INNER / SHARED_PIECE / PIECES;
constexpr int TILES = HIDDEN / 64 / WARPGROUPS;
constexpr int SLOT_BYTES = PIECES * (RoutedPiece::BYTES > SharedPiece::BYTES ? RoutedPiece::BYTES : SharedPiece::BYTES);
constexpr int MOST_COLUMNS = PIECES * (H_COLUMNS > SHARED_PIECE ? H_COLUMNS : SHARED_PIECE);
constexpr int SUMS = 68;  // floats from row to row of a tile's sums: the rows that a warp adds to start in other banks
static_assert(STEPS * PIECES * PIECE >= INNER && SHARED_STEPS * PIECES * SHARED_PIECE == INNER, "whole stages");
static_assert(TILES * WARPGROUPS * 64 == HIDDEN, "whole tiles");

struct Stage {
  alignas(128) u8 weights[WARPGROUPS * SLOT_BYTES];
  alignas(128) u8 codes[8 * MOST_COLUMNS];
  alignas(128) u8 scales[MOST_COLUMNS];
};
struct Shared {
  u64 full[STAGES], empty[STAGES];
  int flag[WARPGROUPS];
  alignas(128) Stage ring[STAGES];
  // Then sums [WARPGROUPS][rows][SUMS] float32, and the experts of the routed pairs.
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cuda.py and this file lay out shared memory differently");

// A place in the order of products: tiles, in a tile pairs, in a pair stages of K.
struct Place {
  int shared_pairs, pairs;
  int tile, pair, step;  // pair counts the shared ones first
  METHOD int per_tile() const { return shared_pairs * SHARED_STEPS + pairs * STEPS; }
  METHOD int all_pairs() const { return shared_pairs + pairs; }
  // The unit at which the `number`-th pair of all tiles' pairs begins.
  METHOD int unit_of(int number) const {
    int in_tile = number % all_pairs(), of_shared = min(in_tile, shared_pairs);
    return number / all_pairs() * per_tile() + of_shared * SHARED_STEPS + (in_tile - of_shared) * STEPS;
  }
  METHOD void seek(int number) { tile = number / all_pairs(), pair = number % all_pairs(), step = 0; }
  METHOD bool routed() const { return pair >= shared_pairs; }
  METHOD bool ends_pair() const { return step + 1 == (routed() ? STEPS : SHARED_STEPS); }
  METHOD bool ends_tile() const { return ends_pair() && pair + 1 == shared_pairs + pairs; }
  METHOD void advance() {
    bool pair_ends = ends_pair(), tile_ends = ends_tile();
    step = pair_ends ? 0 : step + 1;
    pair = tile_ends ? 0 : pair + pair_ends;
    tile += tile_ends;
  }
};

struct Producer {
  const Down& p;
  Shared& s;
  const int* experts;
  u64 policy;

  template <bool FP4> METHOD void weights(const Place& at, int stage) {
    typedef Piece<FP4, FP4 ? PIECE : SHARED_PIECE> P;
    constexpr int N = FP4 ? STEPS : SHARED_STEPS;
    constexpr u32 BYTES = PIECES * P::BYTES;
    constexpr u32 COLUMNS = PIECES * (FP4 ? H_COLUMNS : SHARED_PIECE);
    const u8* from = p.shared_expert;
    if (FP4) from = p.routed + (i64)experts[at.pair - at.shared_pairs] * (TILES * WARPGROUPS * STEPS * BYTES);
    barrier_expect(&s.full[stage], WARPGROUPS * BYTES + 9 * COLUMNS);
#pragma unroll
    for (int wg = 0; wg < WARPGROUPS; wg++) {
      const u8* piece = from + (i64)((at.tile * WARPGROUPS + wg) * N + at.step) * BYTES;
      u8* to = s.ring[stage].weights + wg * SLOT_BYTES;
      if (FP4) bulk_copy(to, piece, BYTES, &s.full[stage], policy);
      else bulk_copy(to, piece, BYTES, &s.full[stage]);
    }
  }
  template <bool FP4> METHOD void h(const Place& at, int stage) {
    constexpr u32 COLUMNS = PIECES * (FP4 ? H_COLUMNS : SHARED_PIECE);
    const u8* from = p.h + (i64)at.pair * (9 * INNER);
    bulk_copy(s.ring[stage].codes, from + at.step * (8 * COLUMNS), 8 * COLUMNS, &s.full[stage]);
    bulk_copy(s.ring[stage].scales, from + 8 * INNER + at.step * COLUMNS, COLUMNS, &s.full[stage]);
  }
  METHOD void weights_of(const Place& at, int stage) {
    if (at.routed()) weights<true>(at, stage); else weights<false>(at, stage);
  }
  METHOD void h_of(const Place& at, int stage) {
    if (at.routed()) h<true>(at, stage); else h<false>(at, stage);
  }
};

template <bool FP4> DEVICE void multiply(float (&acc)[4], const Stage& stage, int warpgroup, int warp, int lane) {
  typedef Piece<FP4, FP4 ? PIECE : SHARED_PIECE> P;
  constexpr int COLUMNS = FP4 ? H_COLUMNS : SHARED_PIECE;
  product<FP4, FP4 ? PIECE : SHARED_PIECE, COLUMNS / 32, PIECES>(
      acc, stage.weights + warpgroup * SLOT_BYTES, stage.codes, (const float*)stage.scales, warp, lane);
}

// A tile's sums of this block are in `sums` [rows][SUMS]: complete them, if other blocks have parts, and send them.
DEVICE void finish(const Down& p, Shared& s, const Split& split, float* sums, int pairs, int tile, bool whole,
                   int rows) {
  int warpgroup = threadIdx.x >> 7, thread = threadIdx.x & 127, barrier = 1 + warpgroup;
  sync_some(barrier, 128);
  Sharing sharing{0, 0, nullptr};
  int me = blockIdx.x;
  float* partial = p.partial + warpgroup * rows * 64;
  auto place = [&](int block, int i) {
    return (float4*)(partial + (i64)partial_slot(sharing, block) * (WARPGROUPS * rows * 64)) + i;
  };
  auto own = [&](int i) { return *(const float4*)(sums + (i >> 4) * SUMS + (i & 15) * 4); };
  if (whole) {
    sharing.first = sharing.last = me;
  } else {
    sharing.first = split.owner(tile * pairs), sharing.last = split.owner(tile * pairs + pairs - 1);
    sharing.arrivals = p.arrivals + sharing.first * WARPGROUPS + warpgroup;
    if (!last_to_come(sharing, &s.flag[warpgroup], barrier, [&] {
          for (int i = thread; i < rows * 16; i += 128) *place(me, i) = own(i);
        })) return;
  }
  for (int i = thread; i < p.rows * 16; i += 128) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int block = sharing.first; block <= sharing.last; block++) {
      float4 part = block == me ? own(i) : load_l2(place(block, i));
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    i64 at = (i64)(i >> 4) * HIDDEN + (tile * WARPGROUPS + warpgroup) * 64 + (i & 15) * 4;
    for (int peer = 0; peer < p.peers; peer++) *(float4*)(p.out[peer] + at) = total;
  }
}

KERNEL(down, Down, THREADS, 1) {
  Shared& s = *(Shared*)shared_memory();
  int tid = threadIdx.x, warp = warp_id(), lane = lane_id();
  const int rows = p.rows;
  float* all_sums = (float*)(shared_memory() + sizeof(Shared));
  int* experts = (int*)(all_sums + WARPGROUPS * rows * SUMS);
  const int shared_pairs = (p.rows + 7) / 8, pairs = load_l2(p.list);
  launch_dependents();
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], WARPGROUPS * 4);
    }
    barrier_init_fence();
  }
  for (int i = tid; i < pairs; i += blockDim.x) experts[i] = load_l2(p.list + 4 + i);
  sync_block();
  Place at{shared_pairs, pairs, 0, 0, 0};
  // Blocks share whole pairs: an expert's product is complete, and rounded to bf16, before the experts are added.
  const Split split = Split::even(TILES * at.all_pairs(), gridDim.x);
  const int begin = at.unit_of(split.begin(blockIdx.x)), end = at.unit_of(split.begin(blockIdx.x + 1));
  at.seek(split.begin(blockIdx.x));
  if (warp == WARPGROUPS * 4 && lane == 0) {
    Producer producer{p, s, experts, evict_first_policy()};
    const int ahead = min(end - begin, STAGES);
    Place early = at;
    for (int i = 0; i < ahead; i++) {
      producer.weights_of(at, i);
      at.advance();
    }
    wait_for_dependencies();
    for (int i = 0; i < ahead; i++) {
      producer.h_of(early, i);
      early.advance();
    }
    Cursor cursor;
    for (int unit = begin + ahead; unit < end; unit++) {
      barrier_wait(&s.empty[cursor.stage], cursor.parity);
      producer.weights_of(at, cursor.stage);
      producer.h_of(at, cursor.stage);
      at.advance();
      cursor.advance();
    }
  } else if (tid < CONSUMERS) {
    wait_for_dependencies();
    int warpgroup = warp >> 2;
    warp &= 3;
    float* sums = all_sums + warpgroup * rows * SUMS;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of a pair
    int2 pair_rows = make_int2(0, 0);
    bool pair_begins = true, tile_begins = true;
    int first_unit = begin;
    Cursor cursor;
    for (int unit = begin; unit < end; unit++) {
      if (tile_begins) {  // a warp's columns are its own
        for (int i = lane; i < rows * 16; i += 32) sums[(i >> 4) * SUMS + warp * 16 + (i & 15)] = 0.0f;
        sync_warp();
      }
      if (pair_begins) pair_rows = load_l2((const int2*)(p.pair_rows + at.pair * 8 + (lane & 3) * 2));
      if (tile_begins) first_unit = unit;
      barrier_wait(&s.full[cursor.stage], cursor.parity);
      if (at.routed()) multiply<true>(acc, s.ring[cursor.stage], warpgroup, warp, lane);
      else multiply<false>(acc, s.ring[cursor.stage], warpgroup, warp, lane);
      sync_warp();
      if (lane == 0) barrier_arrive(&s.empty[cursor.stage]);
      cursor.advance();
      bool last = unit + 1 == end;
      pair_begins = at.ends_pair(), tile_begins = at.ends_tile();
      if (pair_begins) {
#pragma unroll
        for (int i = 0; i < 4; i++) acc[i] = round_bf16(at.routed() ? acc[i] * FP4_FACTOR : acc[i]);
        float* mine = sums + warp * 16 + (lane >> 2);
        if (pair_rows.x >= 0) mine[pair_rows.x * SUMS] += acc[0], mine[pair_rows.x * SUMS + 8] += acc[2];
        if (pair_rows.y >= 0) mine[pair_rows.y * SUMS] += acc[1], mine[pair_rows.y * SUMS + 8] += acc[3];
        sync_warp();
        acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
      }
      if (last || tile_begins) {
        bool whole = tile_begins && unit + 1 - first_unit == at.per_tile();
        finish(p, s, split, sums, at.all_pairs(), at.tile, whole, rows);
        sync_some(1 + warpgroup, 128);  // before the sums are written again
      }
      at.advance();
    }
  }
}
