// The two ends of a step over the decoding slots: `begin` lays out the rows to verify, `commit` takes in what was
// decided, reports it to the host and lays out the rows of the next draft.
//
// Compiled with BLOCK (drafts a request may bring), WORLD, RACE_BLOCKS, RECORD_WORDS (of the host's record).
#include "accept/sampling.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int NO_TOKEN = -1;
constexpr int HEADER = 6;  // words of a record before its tokens
static_assert(BLOCK < 32 && RACE_BLOCKS <= 32 && HEADER + BLOCK + 1 <= RECORD_WORDS && RECORD_WORDS <= 32, "lanes");

// One block. A place is empty (-1) or its request has failed or filled its context: then its rows are inactive.
KERNEL(begin, Begin, THREADS, 1) {
  launch_dependents();
  wait_for_dependencies();
  if (threadIdx.x == 0) *p.step = load_l2(p.step) + 1;
  for (int row = threadIdx.x; row < p.num_places * p.rows_per_request; row += THREADS) {
    int place = row / p.rows_per_request, i = row % p.rows_per_request, slot = load_l2(p.batch_slot + place);
    int token = 0, position = 0, row_slot = -1;
    if (slot >= 0 && !load_l2(p.failed + slot)) {
      int first = load_l2(p.position + slot);
      // The new token needs a place too, and no row may stand behind the end of the context.
      if (first + 1 < p.max_model_len && first + i < p.max_model_len && i <= load_l2(p.num_drafts + slot)) {
        token = load_l2(p.tokens + slot * (BLOCK + 1) + i);
        position = first + i;
        row_slot = slot;
      }
    }
    p.row_token[row] = token;
    p.row_position[row] = position;
    p.row_slot[row] = row_slot;
  }
}

// A warp per place.
KERNEL(commit, Commit, THREADS, 1) {
  launch_dependents();
  wait_for_dependencies();
  int place = blockIdx.x * WARPS + warp_id(), lane = lane_id();
  if (place >= p.num_places) return;
  int first_row = place * p.rows_per_request, slot = load_l2(p.row_slot + first_row), step = load_l2(p.step);
  int accepted = 0, drafts = 0, count = 0, token = NO_TOKEN, position = 0;
  bool failed = false;
  if (slot >= 0) {
    uint4 decision = load_l2((const uint4*)(p.decisions + place * 4));
    accepted = (int)decision.x;
    token = (int)decision.y;
    failed = decision.z;
    drafts = (int)decision.w;
    position = load_l2(p.position + slot);
    if (token == NO_TOKEN && !failed) {
      float best = 0, best_of_p = 0;
      i32 id = NO_ID, id_of_p = NO_ID;
      for (int r = 0; r < WORLD && lane < RACE_BLOCKS; r++) {
        uint4 race = load_l2((const uint4*)(p.races + ((r * p.num_places + place) * RACE_BLOCKS + lane) * 4));
        float score = as_float(race.x), score_of_p = as_float(race.z);
        if (beats(score, (i32)race.y, best, id)) best = score, id = (i32)race.y;
        if (beats(score_of_p, (i32)race.w, best_of_p, id_of_p)) best_of_p = score_of_p, id_of_p = (i32)race.w;
      }
      warp_best(best, id);
      warp_best(best_of_p, id_of_p);
      // No residual although a draft fell: p and q were equal up to rounding.
      token = best > 0 ? id : id_of_p;
    }
    if (failed) accepted = 0;
    else count = accepted + 1;
  }

  int* tokens = p.tokens + slot * (BLOCK + 1);
  int mine = NO_TOKEN;  // the token that lane i delivers
  if (lane < accepted) mine = load_l2(tokens + 1 + lane);
  if (lane == accepted && count) mine = token;
  if (lane < p.rows_per_request) p.committed_slot[first_row + lane] = lane < count ? slot : -1;

  int next = position + count;  // of the token that was drawn, and with it of the draft block
  bool drafting = count && next + 1 < p.max_model_len;
  if (lane < BLOCK) {
    int row = place * BLOCK + lane;
    p.draft_token[row] = !drafting ? 0 : lane == 0 ? token : p.noise_token;
    p.draft_position[row] = drafting ? next + lane : 0;
    p.draft_slot[row] = drafting ? slot : -1;
    p.draft_last[row] = drafting ? next - 1 : 0;
  }
  sync_warp();  // the drafts have been read
  if (lane == 0 && slot >= 0) {
    p.num_drafts[slot] = 0;
    if (failed) p.failed[slot] = 1;
    if (count) {
      p.position[slot] = next;
      tokens[0] = token;
    }
  }

  // The host looks at the first word of the record, so that one is written last.
  u32* record = p.ring + ((i64)(step % p.ring_length) * p.ring_places + place) * RECORD_WORDS;
  int delivered = shuffle(mine, (lane - HEADER) & 31);
  int word = lane == 1   ? slot
             : lane == 2 ? count
             : lane == 3 ? accepted
             : lane == 4 ? drafts
             : lane == 5 ? (int)failed
             : lane < HEADER + BLOCK + 1 ? delivered
                         : 0;
  if (lane >= 1 && lane < RECORD_WORDS) record[lane] = (u32)word;
  sync_warp();
  if (lane == 0) store_release_system(record, (u32)step);
}
