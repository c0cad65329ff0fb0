// Engram table rows of a forward: compressed ids into the history, row numbers of this rank's heads, their gather
// and quantization for the wkv product (reference.row_ids; section 9 of docs/model.md).
//
// A block per row and Engram layer, a thread per 16 bytes of table row. Every thread finds its own row number: the
// few products cost less than meeting for them, and a gather from another memory than the device's is one latency.
// Tokens of earlier positions come from earlier rows of the same forward where they stand there, else from the
// history, whose entries of this forward's positions nobody reads here.
//
// Compiled with LAYERS, HEADS (of this rank), NGRAM (longest), DIM, THREADS.
#include "common.cuh"

constexpr int TABLE_COLUMNS = (NGRAM - 1) * HEADS;
constexpr int ROW_PIECES = DIM / 16;
constexpr int PIECES = TABLE_COLUMNS * ROW_PIECES;
static_assert(DIM % 32 == 0, "two threads share a scale group");
static_assert(THREADS % 32 == 0 && THREADS >= PIECES, "one thread per 16 bytes of a row");

// 16 bytes of a table in its file, which may begin at any byte. Of each word that is read at least one byte is wanted.
DEVICE uint4 load_anywhere(const u8* at) {
  const u32* word = (const u32*)((u64)at & ~3ull);
  u32 shift = (u32)((u64)at & 3) * 8, w[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = i < 4 || shift ? load_l2(word + i) : 0;
#pragma unroll
  for (int i = 0; i < 4 && shift; ++i) w[i] = w[i] >> shift | w[i + 1] << (32 - shift);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

KERNEL(engram_rows, EngramRows, THREADS, 1) {
  launch_dependents();
  int row = (int)blockIdx.x / LAYERS, layer = (int)blockIdx.x % LAYERS;
  int piece = min((int)threadIdx.x, PIECES - 1), column = piece / ROW_PIECES;
  i64 multiplier[NGRAM];
#pragma unroll
  for (int back = 0; back < NGRAM; ++back) multiplier[back] = p.multipliers[layer * NGRAM + back];
  u64 prime = (u64)p.primes[layer * TABLE_COLUMNS + column];
  i64 offset = p.offsets[layer * TABLE_COLUMNS + column];
  i32 pad = p.token_map[p.pad_token];
  wait_for_dependencies();

  i32 slot = load_l2(p.row_slot + row), position = load_l2(p.row_position + row);
  bool active = slot >= 0;
  u64 roll = 0;
#pragma unroll
  for (int back = 0; back < NGRAM; ++back) {
    i32 id = pad;
    int earlier = row - back;
    if (active && position >= back) {
      // Rows of a request are consecutive, in the order of their positions.
      if (earlier >= 0 && load_l2(p.row_slot + earlier) == slot) id = p.token_map[load_l2(p.row_token + earlier)];
      else id = load_l2(p.history + (i64)slot * p.ring + (position - back) % p.ring);
    }
    if (back == 0 && active && layer == 0 && threadIdx.x == 0) p.history[(i64)slot * p.ring + position % p.ring] = id;
    if (back <= column / HEADS + 1) roll ^= (u64)id * (u64)multiplier[back];  // below 2^63 by the choice of multipliers
  }
  i64 table_row = active ? (i64)(roll % prime) + offset : 0;
  if (p.row_ids && threadIdx.x < PIECES && piece % ROW_PIECES == 0)
    p.row_ids[((i64)row * LAYERS + layer) * TABLE_COLUMNS + column] = table_row;

  if (p.tables[layer] == nullptr) return;
  const u8* at = p.tables[layer] + table_row * DIM + piece % ROW_PIECES * 16;
  uint4 codes = ((u64)at & 15) == 0 ? load_stream(at) : load_anywhere(at);
  float scale = ue8m0_to_f32(p.table_scales[layer][table_row * (DIM / 32) + piece % ROW_PIECES / 2]);
  u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  float x[16], amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = active ? round_bf16(e4m3_to_f32(words[i / 4] >> 8 * (i % 4)) * scale) : 0.0f;
    amax = fmaxf(amax, fabsf(x[i]));
  }
  amax = fmaxf(amax, shuffle_xor(amax, 1));
  u32 scale_code = fp8_scale_code(amax);
  float inverse = ue8m0_inverse(scale_code);
#pragma unroll
  for (int w = 0; w < 4; ++w)
    words[w] = f32x2_to_e4m3x2(x[4 * w] * inverse, x[4 * w + 1] * inverse) |
               (u32)f32x2_to_e4m3x2(x[4 * w + 2] * inverse, x[4 * w + 3] * inverse) << 16;
  if (threadIdx.x < PIECES) {
    *(uint4*)(p.codes[layer] + fragment_offset(row, piece * 16, PIECES)) = make_uint4(words[0], words[1], words[2], words[3]);
    if (piece % 2 == 0) p.scales[layer][((i64)(row >> 3) * (PIECES / 2) + piece / 2) * 8 + (row & 7)] = (u8)scale_code;
  }
}
