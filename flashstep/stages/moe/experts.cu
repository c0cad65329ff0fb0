// Experts of up to 8 rows in one kernel: the choice of experts, gate and up products with SwiGLU and fp8 quantization,
// and the down products summed over the experts. One block per multiprocessor, all resident at the same time: weights
// flow without a pause from the first product to the last, and blocks wait for each other's h only between the halves.
//
// Warps: WARPGROUPS of four choose experts and multiply; four finish (add what warpgroups and blocks hold, quantize,
// store); one copies weights and one h. A stage of the ring is a unit: 64 weight rows and a part of K, for one warpgroup, in turn.
//
// Gate and up: a tile is 64 weight rows: 32 gate rows and the 32 up rows of the same columns, interleaved so that a
// thread holds both (`cuda.py` packs). Its 32 columns of h are one fp8 group. The shared expert's weights are known
// before the choice: every block starts with its part of them. The other tiles are dealt whole, as many to each block
// as can be; what is left over is split by units and comes first, so that blocks' parts meet long before they are due.
// Down: a tile is 64 output columns, its K runs over all pairs' h (the shared expert is pair 0). Blocks and warpgroups
// share whole pairs: an expert's product is complete, and rounded to bf16, before the experts are added.
#include "moe/experts.cuh"
#include "moe/route.cuh"

constexpr int FINISHERS = 128, FINISH_BARRIER = 1, MULTIPLY_BARRIER = 2;

typedef Piece<true, PIECE> RoutedPiece;
typedef Piece<false, SHARED_PIECE> SharedPiece;
typedef Piece<true, DOWN_PIECE> DownPiece;
typedef Piece<false, SHARED_DOWN_PIECE> SharedDownPiece;

// Units of a tile of gate and up, and of a pair of down.
constexpr int STEPS = HIDDEN / PIECE / PIECES, SHARED_STEPS = HIDDEN / SHARED_PIECE / PIECES;
constexpr int DOWN_STEPS = (INNER + DOWN_PIECE - 1) / DOWN_PIECE / DOWN_PIECES;
constexpr int SHARED_DOWN_STEPS = INNER / SHARED_DOWN_PIECE / DOWN_PIECES;
constexpr int TILES = INNER / 32, DOWN_TILES = HIDDEN / 64;
constexpr int H_COLUMNS = DOWN_PIECE < INNER ? DOWN_PIECE : INNER;  // of a routed piece that exist
// h of a pair lies as down reads it: for each unit of K its codes, then its float32 scales.
constexpr int H_UNIT = 9 * DOWN_PIECES * H_COLUMNS, SHARED_H_UNIT = 9 * DOWN_PIECES * SHARED_DOWN_PIECE;
constexpr int H_PAIR = 9 * INNER;
static_assert(STEPS * PIECES * PIECE == HIDDEN && SHARED_STEPS * PIECES * SHARED_PIECE == HIDDEN, "whole units");
static_assert(DOWN_STEPS * DOWN_PIECES * DOWN_PIECE >= INNER, "whole units");
static_assert(SHARED_DOWN_STEPS * DOWN_PIECES * SHARED_DOWN_PIECE == INNER, "whole units");

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int H_SLOT = (larger(H_UNIT, SHARED_H_UNIT) + 127) / 128 * 128;
constexpr int UNIT_BYTES = larger(PIECES * larger(RoutedPiece::BYTES, SharedPiece::BYTES),
                                  DOWN_PIECES * larger(DownPiece::BYTES, SharedDownPiece::BYTES));
constexpr int SLOT = (UNIT_BYTES + 127) / 128 * 128;
constexpr int CHOICES = 8 * TOP_K, WORDS = (EXPERTS + 31) / 32;

struct Shared {
  u64 full[STAGES], empty[STAGES];
  u64 sums_full, sums_empty, x_full, bias_full, chosen_all, routed;
  int unit[STAGES];  // that a stage holds or waits for
  alignas(16) u32 named[(WORDS + 3) / 4 * 4];  // a bit for each expert that a row chose
  float bias[EXPERTS];
  int pairs;
  int chosen[64];  // row * TOP_K + place, -1: none
  float chosen_weights[64];
  int experts[64];       // distinct, ascending
  alignas(16) float weights[64][8];  // [distinct expert][row], 0: the row did not choose it
  alignas(16) float amax[2][4][8];   // of h, by warp and row; used alternately
  alignas(16) u8 h[2][256 + 32];  // of a tile: codes and scales; used alternately
  alignas(16) float turned[8][68];
  alignas(128) float4 sums[WARPGROUPS][FINISHERS];
  alignas(128) u8 x[larger(9 * HIDDEN, STAGES * H_SLOT)];  // the rows; once gate and up are done, a ring of h
  alignas(128) u8 ring[STAGES][SLOT];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "cuda.py asks for too little shared memory");

// ---- what a block does ------------------------------------------------------------------------------------------

// A part of a tile of gate and up.
struct Segment {
  int tile, step, count;
  bool fp4, whole;
};

// The segments of a block, in order. Those of the shared expert come first, and can be walked before the choice of
// experts is known; then the parts of the tiles that are left over, then whole tiles.
struct Walk {
  Split shared, left;
  int whole = 0, first_left = 0;  // whole tiles of each block, the first of the tiles that are left over
  int dealt = 0, at, end;
  METHOD Walk() : shared(Split::even(TILES * SHARED_STEPS, gridDim.x)), left{0, 1, 0} {
    at = shared.begin(blockIdx.x), end = shared.begin(blockIdx.x + 1);
  }
  METHOD bool next_shared(Segment& s) { return at < end && take(s, false, SHARED_STEPS, 0); }
  // To be called once `next_shared` has given all.
  METHOD void set_pairs(int pairs) {
    int tiles = pairs * TILES, grid = gridDim.x;
    whole = tiles / grid, first_left = whole * grid;
    left = Split::balanced((tiles - first_left) * STEPS, grid, shared.units);
    at = left.units ? left.begin(blockIdx.x) : 0, end = left.units ? left.begin(blockIdx.x + 1) : 0;
  }
  METHOD bool next_routed(Segment& s) {
    if (at < end) return take(s, true, STEPS, first_left);
    if (dealt == whole) return false;
    s = Segment{dealt++ * (int)gridDim.x + (int)blockIdx.x, 0, STEPS, true, true};
    return true;
  }
  METHOD bool take(Segment& s, bool fp4, int steps, int first_tile) {
    int tile = at / steps, step = at % steps, count = min(steps - step, end - at);
    s = Segment{first_tile + tile, step, count, fp4, count == steps};
    at += count;
    return true;
  }
  // Of this block, in all.
  METHOD int units() const {
    return shared.begin(blockIdx.x + 1) - shared.begin(blockIdx.x) + max(end - at, 0) + whole * STEPS;
  }
};

// The pairs of down's tiles over the blocks.
struct DownSplit {
  int all, per_tile, grid;  // pairs, the shared one included; units
  METHOD DownSplit(int pairs) : all(pairs + 1), per_tile(SHARED_DOWN_STEPS + pairs * DOWN_STEPS), grid(gridDim.x) {}
  METHOD int pair_of(int in_tile) const {
    return in_tile < SHARED_DOWN_STEPS ? 0 : 1 + (in_tile - SHARED_DOWN_STEPS) / DOWN_STEPS;
  }
  METHOD int first_of(int pair) const { return pair == 0 ? 0 : SHARED_DOWN_STEPS + (pair - 1) * DOWN_STEPS; }
  // A number among all tiles' pairs. Blocks get equal units up to a pair, if each has several; else equal pairs.
  METHOD int begin(int block) const {
    int numbers = DOWN_TILES * all;
    if (numbers < 4 * grid) return (int)((u32)numbers * min(block, min(grid, numbers)) / min(grid, numbers));
    u32 unit = (u32)(DOWN_TILES * per_tile) * block / grid, tile = unit / per_tile, rest = unit % per_tile;
    return tile * all + (rest ? pair_of(rest - 1) + 1 : 0);
  }
  // Calls f(tile, pair, step) for every unit of the block, in order.
  template <class F> METHOD void each(int block, F f) const {
    int number = begin(block), count = begin(block + 1) - number, tile = number / all, pair = number % all;
#pragma unroll 1
    for (; count > 0; count--) {
#pragma unroll 1
      for (int step = 0; step < (pair ? DOWN_STEPS : SHARED_DOWN_STEPS); step++) f(tile, pair, step);
      if (++pair == all) pair = 0, tile++;
    }
  }
  METHOD int owner(int number) const {
    int block = min((int)((u32)number * grid / (DOWN_TILES * all)), grid - 1);
    while (begin(block) > number) --block;
    while (begin(block + 1) <= number) ++block;
    return block;
  }
};

// ---- the copying thread -----------------------------------------------------------------------------------------

struct Producer {
  const Experts& p;
  Shared& s;
  u64 policy;
  int unit = 0;

  METHOD int next_slot() {
    int slot = unit % STAGES;
    barrier_wait(&s.empty[slot], (unit / STAGES & 1) ^ 1);
    *(volatile int*)&s.unit[slot] = unit++;
    return slot;
  }
  METHOD void gate_up(const Segment& segment, int i) {
    int slot = next_slot();
    u32 bytes = PIECES * (segment.fp4 ? RoutedPiece::BYTES : SharedPiece::BYTES);
    const u8* from = p.shared_gate_up;
    int tile = segment.tile, steps = SHARED_STEPS;
    if (segment.fp4) {
      from = p.gate_up + (i64)s.experts[tile / TILES] * (TILES * STEPS * PIECES * RoutedPiece::BYTES);
      tile %= TILES, steps = STEPS;
    }
    barrier_expect(&s.full[slot], bytes);
    bulk_copy(s.ring[slot], from + (i64)(tile * steps + segment.step + i) * bytes, bytes, &s.full[slot], policy);
  }
  METHOD void down(int tile, int pair, int step) {
    int slot = next_slot();
    u32 bytes = DOWN_PIECES * (pair ? DownPiece::BYTES : SharedDownPiece::BYTES);
    const u8* from = p.shared_down + (i64)tile * SHARED_DOWN_STEPS * bytes;
    if (pair) from = p.down + ((i64)s.experts[pair - 1] * DOWN_TILES + tile) * DOWN_STEPS * bytes;
    barrier_expect(&s.full[slot], bytes + (pair ? H_UNIT : SHARED_H_UNIT));  // h: see HProducer
    bulk_copy(s.ring[slot], from + (i64)step * bytes, bytes, &s.full[slot], policy);
  }

  METHOD void run() {
    Walk walk;
    Segment segment;
    const int early = min(walk.end - walk.at, STAGES);  // nobody empties the ring before
    bool shared = true;
    while (true) {
      if (shared && !walk.next_shared(segment)) {
        if (unit == early) rows();
        barrier_wait(&s.routed, 0);
        walk.set_pairs(s.pairs);
        shared = false;
      }
      if (!shared && !walk.next_routed(segment)) break;
#pragma unroll 1
      for (int i = 0; i < segment.count; i++) {
        if (shared && unit == STAGES) rows();
        gate_up(segment, i);
      }
    }
    const DownSplit split(s.pairs);
    split.each(blockIdx.x, [&](int tile, int pair, int step) { down(tile, pair, step); });
  }
  METHOD void rows() {
    wait_for_dependencies();
    barrier_expect(&s.x_full, 8 * HIDDEN);
    bulk_copy(s.x, p.x_codes, 8 * HIDDEN, &s.x_full);
  }
};

// Copies h beside the weights of down, once all blocks have written theirs.
struct HProducer {
  const Experts& p;
  Shared& s;

  METHOD void run() {
    Walk walk;
    barrier_wait(&s.routed, 0);
    walk.set_pairs(s.pairs);
    int unit = walk.units();
    while (load_acquire(p.arrivals) != gridDim.x) relax();
    fence_async_device();
    const DownSplit split(s.pairs);
    split.each(blockIdx.x, [&](int, int pair, int step) {
      int slot = unit % STAGES;
      u32 bytes = pair ? H_UNIT : SHARED_H_UNIT;
      wait_value(&s.unit[slot], unit++);
      bulk_copy(s.x + slot * H_SLOT, p.h + (i64)pair * H_PAIR + step * bytes, bytes, &s.full[slot]);
    });
    // Every block counts itself out; the last one makes the counters ready for the next launch.
    if (add_atomic(p.arrivals + 1, 1) == gridDim.x - 1) {
      p.arrivals[0] = 0;
      p.arrivals[1] = 0;
    }
  }
};

// ---- the multiplying warps --------------------------------------------------------------------------------------

struct Multiplier {
  Shared& s;
  int warpgroup, warp, lane;
  int unit = 0;  // of the block, at the start of what comes next
  u32 segments = 0;

  // Warpgroups run ahead of each other: a parity alone could be that of the stage's use before the last.
  METHOD void wait_full(int at) const {
    wait_value(&s.unit[at % STAGES], at);
    barrier_wait(&s.full[at % STAGES], at / STAGES & 1);
  }
  METHOD void release(int at) const {
    sync_warp();
    if (lane == 0) barrier_arrive(&s.empty[at % STAGES]);
  }
  METHOD void hand_over(const float (&sum)[4]) {
    barrier_wait(&s.sums_empty, (segments++ & 1) ^ 1);
    s.sums[warpgroup][warp * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    sync_warp();
    if (lane == 0) barrier_arrive(&s.sums_full);
  }
  // Units of the segment in turn: this warpgroup's are those whose number leaves its own over WARPGROUPS.
  template <bool FP4> METHOD void gate_up(const Segment& segment) {
    constexpr int COLUMNS = FP4 ? PIECE : SHARED_PIECE;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int i = (warpgroup + WARPGROUPS - unit % WARPGROUPS) % WARPGROUPS;
#pragma unroll 1
    for (; i < segment.count; i += WARPGROUPS) {
      int step = segment.step + i, at = unit + i;
      wait_full(at);
      product<FP4, COLUMNS, COLUMNS / 32, PIECES>(acc, s.ring[at % STAGES], s.x + step * (PIECES * COLUMNS * 8),
                                                  (const float*)(s.x + 8 * HIDDEN) + step * (PIECES * COLUMNS / 4),
                                                  warp, lane);
      release(at);
    }
    unit += segment.count;
    hand_over(acc);
  }
  template <bool FP4> METHOD void down(float (&acc)[4], int steps) {
    constexpr int PIECE_COLUMNS = FP4 ? DOWN_PIECE : SHARED_DOWN_PIECE;
    constexpr int COLUMNS = FP4 ? H_COLUMNS : SHARED_DOWN_PIECE;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      const u8* h = s.x + (unit + i) % STAGES * H_SLOT;
      wait_full(unit + i);
      product<FP4, PIECE_COLUMNS, COLUMNS / 32, DOWN_PIECES>(acc, s.ring[(unit + i) % STAGES], h,
                                                             (const float*)(h + 8 * DOWN_PIECES * COLUMNS), warp, lane);
      release(unit + i);
    }
  }
  METHOD void run() {
    Walk walk;
    Segment segment;
    while (walk.next_shared(segment)) gate_up<false>(segment);
    barrier_wait(&s.routed, 0);
    walk.set_pairs(s.pairs);
    while (walk.next_routed(segment)) gate_up<true>(segment);
    const DownSplit split(s.pairs);
    int begin = split.begin(blockIdx.x), end = split.begin(blockIdx.x + 1);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int pair = begin % split.all;
    for (int number = begin; number < end; number++) {
      int steps = pair ? DOWN_STEPS : SHARED_DOWN_STEPS;
      if (number % WARPGROUPS == warpgroup) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (pair) down<true>(acc, steps); else down<false>(acc, steps);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += round_bf16(pair ? acc[i] * FP4_FACTOR : acc[i]);
      }
      unit += steps;
      if (++pair == split.all || number + 1 == end) {
        hand_over(sum);
        sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
        if (pair == split.all) pair = 0;
      }
    }
  }
};

// ---- the finishing warps ----------------------------------------------------------------------------------------

struct Finisher {
  const Experts& p;
  Shared& s;
  int thread, warp, lane;
  u32 segments = 0;
  int finished = 0;

  METHOD void sync() const { sync_some(FINISH_BARRIER, FINISHERS); }

  // The distinct experts of the choices, ascending, and each row's weight for them.
  METHOD void list_experts() {
    for (int i = thread; i < 64 * 8; i += FINISHERS) (&s.weights[0][0])[i] = 0.0f;
    if (thread < WORDS) s.named[thread] = 0;
    int row = thread / TOP_K, slot = thread < CHOICES && row < p.rows ? load_l2(p.row_slot + row) : -1;
    sync();
    barrier_wait(&s.chosen_all, 0);
    int expert = slot >= 0 ? s.chosen[thread] : -1;  // an inactive row chooses none
    if (expert >= 0) or_atomic(&s.named[expert / 32], 1u << (expert % 32));
    sync();
    if (thread == 0 || expert >= 0) {
      int before = 0, all = 0;
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        u32 word = s.named[w];
        all += count_bits(word);
        u32 below = w < (expert >> 5) ? ~0u : w == (expert >> 5) ? (1u << (expert & 31)) - 1u : 0u;
        before += count_bits(word & below);
      }
      if (expert >= 0) {
        s.experts[before] = expert;
        s.weights[before][row] = s.chosen_weights[thread];
      }
      if (thread == 0) s.pairs = all;
    }
    sync();
    if (thread == 0) barrier_arrive(&s.routed);
    if (blockIdx.x == 0) {  // for whoever wants to know
      if (thread == 0) p.list[0] = s.pairs;
      if (thread < s.pairs) p.list[4 + thread] = s.experts[thread];
    }
  }

  // Sums that a block leaves for another one. They are their own arrival mark: stored inverted, where zeros lie, as no
  // sum has the bits of the inverted zero; who takes them leaves zeros again.
  METHOD uint4* part(int kind, int block, bool first) const {
    return (uint4*)p.partial + (i64)(kind * 2 * gridDim.x + 2 * block + first) * FINISHERS + thread;
  }
  METHOD void leave(int kind, int first, float4 sum) const {
    uint4 bits = make_uint4(~as_bits(sum.x), ~as_bits(sum.y), ~as_bits(sum.z), ~as_bits(sum.w));
    store_volatile(part(kind, blockIdx.x, (int)blockIdx.x == first), bits);
  }
  // `sum`, this block's own part, and those of the blocks behind it up to `last`, in order.
  METHOD float4 add_parts(int kind, float4 sum, int last) const {
    constexpr int AT_ONCE = 4;
    for (int first = blockIdx.x + 1; first <= last; first += AT_ONCE) {
      uint4 bits[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (first + i <= last) bits[i] = load_volatile(part(kind, first + i, false));
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (first + i > last) break;
        uint4* from = part(kind, first + i, false);
        while (!(bits[i].x && bits[i].y && bits[i].z && bits[i].w)) bits[i] = load_volatile(from);
        *from = make_uint4(0, 0, 0, 0);
        sum.x += as_float(~bits[i].x), sum.y += as_float(~bits[i].y);
        sum.z += as_float(~bits[i].z), sum.w += as_float(~bits[i].w);
      }
    }
    return sum;
  }

  // The warpgroups' sums, added in order.
  METHOD float4 collect() {
    barrier_wait(&s.sums_full, segments++ & 1);
    float4 total = s.sums[0][thread];
#pragma unroll
    for (int w = 1; w < WARPGROUPS; w++) {
      float4 part = s.sums[w][thread];
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    sync_warp();
    if (lane == 0) barrier_arrive(&s.sums_empty);
    return total;
  }
  // Sums of the tile of `split` that this block began and others go on with, if there is one; its own part is left like
  // theirs.
  METHOD bool take_begun(const Split split, int kind, int steps, int& tile, float4& sum) {
    int begin = split.begin(blockIdx.x), end = split.begin(blockIdx.x + 1);
    tile = end / steps;
    if (split.units == 0 || begin == end || end % steps == 0 || tile * steps < begin) return false;
    uint4* from = part(kind, blockIdx.x, true);
    uint4 bits = load_volatile(from);
    *from = make_uint4(0, 0, 0, 0);
    float4 own = make_float4(as_float(~bits.x), as_float(~bits.y), as_float(~bits.z), as_float(~bits.w));
    sum = add_parts(kind, own, split.owner(tile * steps + steps - 1));
    return true;
  }

  // h of a tile whose sums are complete.
  METHOD void emit(float4 sum, bool fp4, int tile) {
    const float factor = fp4 ? FP4_FACTOR : 1.0f;
    const float acc[4] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    int pair = fp4 ? 1 + tile / TILES : 0, group = tile % TILES, row = (lane & 3) * 2;  // and row + 1
    float2 weight = make_float2(1.0f, 1.0f);
    if (fp4) weight = *(const float2*)&s.weights[pair - 1][row];
    float h[2];
#pragma unroll
    for (int i = 0; i < 2; i++) h[i] = swiglu(acc[i], acc[2 + i], i ? weight.y : weight.x);
    float amax[2] = {fabsf(h[0]), fabsf(h[1])};
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) {
      amax[0] = fmaxf(amax[0], shuffle_xor(amax[0], m));
      amax[1] = fmaxf(amax[1], shuffle_xor(amax[1], m));
    }
    float(*shared_amax)[8] = s.amax[finished & 1];
    if (lane < 4) *(float2*)&shared_amax[warp][row] = make_float2(amax[0], amax[1]);
    sync();
    u8* staged = s.h[finished & 1];
    int column = warp * 8 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = shared_amax[0][row + i];
#pragma unroll
      for (int w = 1; w < 4; w++) most = fmaxf(most, shared_amax[w][row + i]);
      u32 code = fp8_scale_code(most);
      staged[((column >> 4) * 8 + row + i) * 16 + (column & 15)] =
          (u8)f32x2_to_e4m3x2(h[i] * ue8m0_inverse(code), 0.0f);
      if (warp == 0 && lane < 4) ((float*)(staged + 256))[row + i] = ue8m0_to_f32(code);
    }
    sync();
    const int unit = fp4 ? H_UNIT : SHARED_H_UNIT, groups = unit / 288;  // of 32 columns
    u8* to = p.h + (i64)pair * H_PAIR + group / groups * unit;
    if (thread < 18) {
      to += thread < 16 ? group % groups * 256 + thread * 16 : groups * 256 + group % groups * 32 + (thread - 16) * 16;
      *(uint4*)to = *(const uint4*)(staged + thread * 16);
    }
    finished++;
  }

  METHOD void gate_up() {
    Walk walk;
    Segment segment;
    bool shared = true, next = false;  // whether `segment` is still to be done
    int begun = 2;  // tiles that this block began and others go on with: of the shared expert, of what is left over
#pragma unroll 1
    while (true) {
      if (!next && shared) {
        next = walk.next_shared(segment);
        if (!next) walk.set_pairs(s.pairs), shared = false;
      }
      if (!next) next = walk.next_routed(segment);
      float4 sum;
      int tile;
      bool fp4;
      // Begun tiles come between whole ones: when others' parts are there, and nothing else is due.
      if (begun && !shared && (!next || walk.dealt > 2 - begun)) {
        begun--;
        fp4 = begun == 0;
        const Split split = fp4 ? walk.left : walk.shared;
        if (!take_begun(split, fp4, fp4 ? STEPS : SHARED_STEPS, tile, sum)) continue;
        if (fp4) tile += walk.first_left;
      } else if (next) {
        next = false;
        sum = collect();
        tile = segment.tile, fp4 = segment.fp4;
        if (!segment.whole) {
          int first = fp4 ? walk.left.owner((tile - walk.first_left) * STEPS) : walk.shared.owner(tile * SHARED_STEPS);
          leave(fp4, first, sum);
          continue;
        }
      } else {
        break;
      }
      emit(sum, fp4, tile);
    }
    sync();
    if (thread == 0) add_release(p.arrivals, 1);
  }

  // The block that begins a tile comes to it last, and adds what the blocks behind it have left.
  METHOD void down() {
    constexpr int KIND = 2;
    const DownSplit split(s.pairs);
    int end = split.begin(blockIdx.x + 1);
#pragma unroll 1
    for (int number = split.begin(blockIdx.x); number < end;) {
      int tile = number / split.all, next = (tile + 1) * split.all, last = blockIdx.x;
      if (next > end) last = split.owner(next - 1);
      float4 sum = collect();
      if (number % split.all == 0) send(add_parts(KIND, sum, last), tile);
      else leave(KIND, -1, sum);
      number = min(next, end);
    }
  }
  METHOD void send(float4 sum, int tile) {
    int row = (lane & 3) * 2, column = warp * 16 + (lane >> 2);
    sync();  // the rows before have been read
    s.turned[row][column] = sum.x, s.turned[row + 1][column] = sum.y;
    s.turned[row][column + 8] = sum.z, s.turned[row + 1][column + 8] = sum.w;
    sync();
    if (thread >= p.rows * 16) return;
    float4 value = *(const float4*)&s.turned[thread >> 4][(thread & 15) * 4];
    i64 at = (i64)(thread >> 4) * HIDDEN + tile * 64 + (thread & 15) * 4;
    for (int peer = 0; peer < p.peers; peer++) *(float4*)(p.out[peer] + at) = value;
  }
};

KERNEL(experts, Experts, THREADS, 1) {
  Shared& s = *(Shared*)shared_memory();
  int tid = threadIdx.x, warp = warp_id(), lane = lane_id();
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 4);
      s.unit[i] = -1;
    }
    barrier_init(&s.sums_full, WARPGROUPS * 4);
    barrier_init(&s.sums_empty, 4);
    barrier_init(&s.x_full, 1);
    barrier_init(&s.bias_full, FINISHERS / 32);
    barrier_init(&s.chosen_all, 8);
    barrier_init(&s.routed, 1);
    barrier_init_fence();
  }
  sync_block();
  if (tid < CONSUMERS) {
    wait_for_dependencies();
    if (tid == 0) launch_dependents();
    for (int row = warp; row < 8; row += WARPGROUPS * 4) {
      float score[PER_LANE], bias[PER_LANE];
      if (row < p.rows) load_lane(score, p.scores + row * EXPERTS, lane);
      barrier_wait(&s.bias_full, 0);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        bias[i] = lane * PER_LANE + i < EXPERTS ? s.bias[lane * PER_LANE + i] : 0.0f;
      route_row(score, bias, row < p.rows, row, s.chosen, s.chosen_weights);
      sync_warp();
      if (lane == 0) barrier_arrive(&s.chosen_all);
    }
    float* scales = (float*)(s.x + 8 * HIDDEN);
    for (int i = tid; i < HIDDEN / 16; i += CONSUMERS) {  // four codes each
      u32 codes = load_l2((const u32*)p.x_scales + i);
      *(float4*)(scales + 4 * i) = make_float4(ue8m0_to_f32(codes & 255u), ue8m0_to_f32((codes >> 8) & 255u),
                                               ue8m0_to_f32((codes >> 16) & 255u), ue8m0_to_f32(codes >> 24));
    }
    sync_some(MULTIPLY_BARRIER, CONSUMERS);
    barrier_wait(&s.x_full, 0);
    Multiplier{s, warp >> 2, warp & 3, lane}.run();
  } else if (tid < CONSUMERS + FINISHERS) {
    // Once a block: every warp of every block asking for these few lines took 3 us, and the wait behind it as long.
    for (int i = tid - CONSUMERS; i < EXPERTS; i += FINISHERS) s.bias[i] = load_l2(p.bias + i);
    sync_warp();
    if (lane == 0) barrier_arrive(&s.bias_full);
    wait_for_dependencies();
    Finisher finisher{p, s, tid - CONSUMERS, warp & 3, lane};
    finisher.list_experts();
    finisher.gate_up();
    finisher.down();
  } else if (tid == CONSUMERS + FINISHERS) {
    Producer{p, s, evict_first_policy()}.run();
  } else if (tid == CONSUMERS + FINISHERS + 32) {
    wait_for_dependencies();
    HProducer{p, s}.run();
  }
}
