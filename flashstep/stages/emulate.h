// The machine of common.cuh on a CPU: runs a kernel's own text thread by thread, for tests without a GPU.
//
// Every thread of a block is a fiber with a small stack; one fiber runs at a time and gives way only inside the
// functions below, so a kernel's result does not depend on timing. Blocks run one after another, those of a cluster
// together. The emulator is stricter than the hardware where that finds mistakes:
// - shared memory holds 0xFF (NaN) before a block starts and again after it has ended, and ends with a checked margin;
// - cp.async data arrives only at cp_async_wait, bulk copies either at once or only when somebody waits for them,
//   wgmma results only at wgmma_wait (NaN before), all reading their source at that moment;
// - blocks, and launches, alternate between running warps in rising and in falling order;
// - a block must have called wait_for_dependencies, and must not end with copies or products in flight.
// Products are exact sums (in double) rounded once to float32; tensor cores truncate a little along the way.
// A mistake ends the launch with a message (deadlocks say who waits where); the process lives on.
#pragma once

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#define DEVICE static inline __attribute__((unused))
#define HAS_WGMMA 1

// ---- CUDA's words -----------------------------------------------------------------------------------------------

#define VECTOR_TYPES(scalar, two, four)                                                                 \
  struct alignas(2 * sizeof(scalar)) two { scalar x, y; };                                              \
  struct alignas(4 * sizeof(scalar)) four { scalar x, y, z, w; };                                       \
  DEVICE two make_##two(scalar x, scalar y) { return two{x, y}; }                                       \
  DEVICE four make_##four(scalar x, scalar y, scalar z, scalar w) { return four{x, y, z, w}; }
VECTOR_TYPES(u32, uint2, uint4)
VECTOR_TYPES(i32, int2, int4)
VECTOR_TYPES(float, float2, float4)
#undef VECTOR_TYPES

struct Index3 { u32 x, y, z; };
// Global, not static: the compiler must expect a switch of fibers to change them.
__attribute__((visibility("hidden"))) Index3 threadIdx, blockIdx, blockDim, gridDim;

#define MIN_MAX(type)                                             \
  DEVICE type min(type a, type b) { return b < a ? b : a; }       \
  DEVICE type max(type a, type b) { return a < b ? b : a; }
MIN_MAX(int) MIN_MAX(u32) MIN_MAX(i64) MIN_MAX(u64)
#undef MIN_MAX
// As in CUDA: an int beside a u32 is taken as unsigned; floats as fminf, fmaxf.
DEVICE u32 min(u32 a, int b) { return min(a, (u32)b); }
DEVICE u32 min(int a, u32 b) { return min((u32)a, b); }
DEVICE u32 max(u32 a, int b) { return max(a, (u32)b); }
DEVICE u32 max(int a, u32 b) { return max((u32)a, b); }
DEVICE float min(float a, float b) { return fminf(a, b); }
DEVICE float max(float a, float b) { return fmaxf(a, b); }
DEVICE float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// ---- fibers -----------------------------------------------------------------------------------------------------

namespace emulate {

constexpr size_t STACK = 64 * 1024;
constexpr size_t PAGE = 4096;
constexpr size_t GUARD = 1 << 20;           // inaccessible bytes before and behind a block's shared memory
constexpr int MAX_CLUSTER = 16;
constexpr u64 POLLS_BEFORE_DEADLOCK = 20000000;  // polls while nothing else happens: about a second
constexpr u64 CANARY = 0x5AFE57ACC5AFE57Aull;

#ifdef __x86_64__
struct Context { void* stack_pointer; };
extern "C" __attribute__((visibility("hidden"))) void flashstep_switch_stack(void** from, void* to);
asm(R"(
.text
.type flashstep_switch_stack, @function
flashstep_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flashstep_switch_stack, .-flashstep_switch_stack
)");
static void switch_context(Context& from, Context& to) {
  flashstep_switch_stack(&from.stack_pointer, to.stack_pointer);
}
static void make_context(Context& context, u8* stack, size_t bytes, void (*entry)()) {
  u64* top = (u64*)((uintptr_t)(stack + bytes) & ~(uintptr_t)15) - 2;  // the entry sees its stack as after a call
  top[1] = 0;
  top[0] = (u64)(uintptr_t)entry;
  for (int i = 1; i <= 6; i++) top[-i] = 0;
  context.stack_pointer = top - 6;
}
#else
struct Context { ucontext_t context; };
static void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
static void make_context(Context& context, u8* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = bytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}
#endif

template <class T> struct List {  // zero-initialized; keeps its memory
  T* items;
  int count, capacity;
  T& add() {
    if (count == capacity)
      items = (T*)realloc((void*)items, sizeof(T) * (size_t)(capacity = capacity ? 2 * capacity : 16));
    return items[count++];
  }
  void drop_front(int n) {
    memmove((void*)items, (void*)(items + n), sizeof(T) * (size_t)(count - n));
    count -= n;
  }
};

// A place in a source: a default argument, so that it is the caller's.
struct Where {
  const char* file;
  int line;
  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return Where{file, line};
  }
};
#define WHERE emulate::Where where = emulate::Where::here()

enum class At : u8 { RUNNING, FINISHED, WARP, BLOCK, SOME, CLUSTER, BARRIER };

struct Copy { void* shared; const void* global; u32 bytes; u64* barrier; int group; };
struct Product {
  float* d;
  u32 a[4];
  const u8* b;  // core matrices of the first tile of 8 rows; the next tile is `stride` on
  int stride, tiles, group;
  bool bf16;     // added to what was in `d`, or to what the products before leave there; e4m3: written
  bool first;    // of those in flight that go to `d`: before them it held `before`
  float before[24];
};
struct Block;
struct Warp;

struct Fiber {
  Context context;
  Fiber* next;
  Block* block;
  Warp* warp;
  u32 thread, lane;
  At at;
  Where where;            // it last called a function of this file that waits or checks
  const char* operation;  // of the warp function it waits in
  int id;                 // of the `sync_some` it waits in
  u64* barrier;           // it waits for, and the parity
  u32 parity;
  u32 cluster_generation;
  bool cluster_arrived;
  bool products_open;     // between wgmma_begin and wgmma_commit
  int copy_group, product_group;
  List<Copy> copies;        // cp.async not yet waited for
  List<Product> products;   // wgmma not yet waited for
  u8* stack;
};

struct Queue {
  Fiber *head, *tail;
  void push(Fiber* f) {
    f->next = nullptr;
    if (tail) tail->next = f; else head = f;
    tail = f;
  }
  Fiber* pop() {
    Fiber* f = head;
    if (f && !(head = f->next)) tail = nullptr;
    return f;
  }
  void splice(Queue& other) {
    if (!other.head) return;
    if (tail) tail->next = other.head; else head = other.head;
    tail = other.tail;
    other.head = other.tail = nullptr;
  }
};

struct Warp {
  Queue waiting;
  int arrived;
  const char* operation;
  u32 generation;
  u32 bits[2];
  alignas(16) u8 slots[2][32][16];  // two generations: a fast lane may enter the next function before a slow one leaves
  Fiber* lanes[32];
};

struct Meeting { Queue waiting; int arrived, expected; };

struct Block {
  int index, alive;
  bool waited;  // called wait_for_dependencies
  u8* shared;
  Meeting meetings[16];  // 0: sync_block
  List<Copy> copies;     // bulk copies not yet carried out
};

struct Machine {
  const char* kernel;
  void (*body)(const void*);
  const void* params;
  int grid, block, shared, cluster;
  u64 launches, polls, coin;
  Context main;
  Fiber* current;
  Queue ready;
  Fiber* waiting;  // for mbarriers
  Fiber* fibers;
  int fiber_capacity;
  u8* stacks;
  Warp* warps;
  Block blocks[MAX_CLUSTER];
  u8* memory;  // of all shared memories
  size_t memory_bytes, memory_extent;
  Queue cluster_waiting;
  int cluster_arrived, cluster_alive;
  u32 cluster_generation;
  bool failed;
  size_t used;
  char message[4096];
};
__attribute__((visibility("hidden"))) Machine machine;

// A block's shared memory and a checked rest, in whole pages.
static inline size_t shared_extent() { return ((size_t)machine.shared + PAGE) & ~(PAGE - 1); }

static void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char* format, ...) {
  if (machine.used >= sizeof machine.message - 1) return;
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(machine.message + machine.used, sizeof machine.message - machine.used, format, arguments);
  va_end(arguments);
  if (n > 0) machine.used += (size_t)n;
}

// Ends the launch from inside a fiber; its stack is simply left.
[[noreturn]] static void leave() {
  machine.failed = true;
  Context abandoned;
  switch_context(abandoned, machine.main);
  __builtin_unreachable();
}

static bool after;  // the mistake is somewhere behind the place the fiber notes, not there

[[noreturn]] static void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] static void fail(const char* format, ...) {
  machine.used = 0;
  const Fiber* f = machine.current;
  say("kernel %s, block %d, thread %u", machine.kernel, f->block->index, f->thread);
  if (f->where.file) say(", %s %s:%d", after ? "after" : "at", f->where.file, f->where.line);
  say(": ");
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  say("%s", text);
  leave();
}

static inline void run(Fiber* f) {
  Fiber* from = machine.current;
  if (f == from) return;
  machine.current = f;
  threadIdx.x = f->thread;
  blockIdx.x = (u32)f->block->index;
  switch_context(from->context, f->context);
}

// An mbarrier's word: {mark 8, phase 1, expected arrivals 13, arrivals to come 13, bytes to come 29 (signed)}.
struct Barrier { u64 mark : 8, phase : 1, expected : 13, pending : 13; i64 bytes : 29; };
static_assert(sizeof(Barrier) == 8, "");
constexpr u64 BARRIER_MARK = 0xB5;

static void describe(const Fiber* f) {
  switch (f->at) {
    case At::RUNNING: say("polling or ready to run"); break;
    case At::FINISHED: say("finished"); break;
    case At::WARP: say("in warp function %s, whose warp is not complete", f->operation); break;
    case At::BLOCK: say("at sync_block"); break;
    case At::SOME: say("at sync_some(%d, %d)", f->id, f->block->meetings[f->id].expected); break;
    case At::CLUSTER: say("at cluster_wait"); break;
    case At::BARRIER: {
      Barrier b;
      memcpy(&b, f->barrier, 8);
      say("at barrier_wait(shared + %td, parity %u): phase %u, %u of %u arrivals and %d bytes to come",
          (u8*)f->barrier - f->block->shared, f->parity, (u32)b.phase, (u32)b.pending, (u32)b.expected, (int)b.bytes);
    }
  }
}

static bool same_place(const Fiber* a, const Fiber* b) {
  if (a->at != At::FINISHED && (a->where.line != b->where.line || a->where.file != b->where.file)) return false;
  return a->at == b->at && (a->at != At::WARP || !strcmp(a->operation, b->operation)) &&
         (a->at != At::SOME || a->id == b->id) &&
         (a->at != At::BARRIER || (a->barrier == b->barrier && a->parity == b->parity));
}

[[noreturn]] static void deadlock(const char* what) {
  machine.used = 0;
  say("kernel %s: %s\n", machine.kernel, what);
  for (int b = 0; b < machine.cluster; b++) {
    const Fiber* fibers = machine.fibers + b * machine.block;
    for (int t = 0; t < machine.block; t++) {
      int first = 0, count = 0;
      while (!same_place(&fibers[first], &fibers[t])) first++;
      if (first < t) continue;
      for (int u = t; u < machine.block; u++) count += same_place(&fibers[t], &fibers[u]);
      say("  block %d: %d thread%s (first: %d) ", fibers[t].block->index, count, count == 1 ? "" : "s", t);
      describe(&fibers[t]);
      if (fibers[t].where.file && fibers[t].at != At::FINISHED)
        say(" (%s:%d)", fibers[t].where.file, fibers[t].where.line);
      say("\n");
    }
  }
  leave();
}

static inline void note(Where where) { machine.current->where = where; }

static bool carry_out_any();

// The current fiber waits somewhere: the next one runs.
static void suspend() {
  while (!machine.ready.head)
    if (!carry_out_any()) deadlock("deadlock, no thread can go on");
  run(machine.ready.pop());
}

static void poll() {
  if (machine.polls % 256 == 255) carry_out_any();
  if (++machine.polls > POLLS_BEFORE_DEADLOCK) deadlock("deadlock, threads only poll");
  machine.ready.push(machine.current);
  suspend();
}

static inline void wake(Queue& waiting) {
  for (Fiber* f = waiting.head; f; f = f->next) f->at = At::RUNNING;
  machine.ready.splice(waiting);
}

// ---- meetings ---------------------------------------------------------------------------------------------------

// The 32 lanes of a warp meet; the last one runs `combine` before any goes on.
template <class F> static inline void rendezvous(const char* operation, F combine) {
  Fiber* f = machine.current;
  Warp* w = f->warp;
  if (w->arrived && w->operation != operation && strcmp(w->operation, operation))
    fail("is in %s, while other lanes of its warp are in %s", operation, w->operation);
  w->operation = operation;
  if (++w->arrived < 32) {
    f->at = At::WARP;
    f->operation = operation;
    w->waiting.push(f);
    suspend();
    return;
  }
  combine();
  w->arrived = 0;
  w->generation++;
  wake(w->waiting);
}

template <class T, class F> static inline T exchange(const char* operation, T value, F source) {
  static_assert(sizeof(T) <= 8, "a warp shuffle moves at most 8 bytes");
  Fiber* f = machine.current;
  u8(*slots)[16] = f->warp->slots[f->warp->generation & 1];
  memcpy(slots[f->lane], &value, sizeof(T));
  rendezvous(operation, [] {});
  memcpy(&value, slots[source((int)f->lane) & 31], sizeof(T));
  return value;
}

static void release(Meeting& m) {
  m.arrived = 0;
  machine.polls = 0;
  wake(m.waiting);
}

static void meet(int id, int expected, At at) {
  Fiber* f = machine.current;
  Meeting& m = f->block->meetings[id];
  if (id && m.arrived && m.expected != expected)
    fail("sync_some(%d, %d), while others wait for %d", id, expected, m.expected);
  m.expected = expected;
  if (++m.arrived >= expected) return release(m);
  f->at = at;
  f->id = id;
  m.waiting.push(f);
  suspend();
}

static void release_cluster() {
  machine.cluster_arrived = 0;
  machine.cluster_generation++;
  machine.polls = 0;
  wake(machine.cluster_waiting);
}

// ---- mbarriers and copies ---------------------------------------------------------------------------------------

static void check_shared(const char* operation, const void* p, size_t bytes, size_t alignment) {
  const u8* base = machine.current->block->shared;
  if ((const u8*)p < base || (const u8*)p + bytes > base + machine.shared)
    fail("%s: bytes %td..%td are outside the block's %d bytes of shared memory", operation, (const u8*)p - base,
         (const u8*)p - base + (ptrdiff_t)bytes, machine.shared);
  if ((uintptr_t)p % alignment)
    fail("%s: shared + %td is not a multiple of %zu", operation, (const u8*)p - base, alignment);
}

static void check_global(const char* operation, const void* p, size_t alignment) {
  if ((uintptr_t)p % alignment) fail("%s: address %p is not a multiple of %zu", operation, p, alignment);
}

static Barrier read_barrier(const char* operation, u64* word) {
  check_shared(operation, word, 8, 8);
  Barrier b;
  memcpy(&b, word, 8);
  if (b.mark != BARRIER_MARK)
    fail("%s: no barrier_init was done at shared + %td", operation, (u8*)word - machine.current->block->shared);
  return b;
}

static void write_barrier(u64* word, Barrier b) {
  bool complete = b.pending == 0 && b.bytes == 0;
  if (complete) {
    b.phase ^= 1;
    b.pending = b.expected;
    machine.polls = 0;
  }
  memcpy(word, &b, 8);
  if (!complete) return;
  for (Fiber** link = &machine.waiting; *link;) {
    Fiber* f = *link;
    if (f->barrier != word) {
      link = &f->next;
      continue;
    }
    *link = f->next;
    f->at = At::RUNNING;
    machine.ready.push(f);
  }
}

static void arrive(const char* operation, u64* word, u32 bytes) {
  Barrier b = read_barrier(operation, word);
  if (b.pending == 0)
    fail("%s: more arrivals in a phase than the barrier at shared + %td expects", operation,
         (u8*)word - machine.current->block->shared);
  b.bytes += bytes;
  b.pending -= 1;
  write_barrier(word, b);
}

static void carry_out(const Copy& c) {
  memcpy(c.shared, c.global, c.bytes);
  Barrier b;
  memcpy(&b, c.barrier, 8);
  b.bytes -= (i32)c.bytes;
  write_barrier(c.barrier, b);
}

// Carries out one deferred copy of the block for `barrier` (null: for any); false if there is none.
static bool carry_out_one(Block* block, const u64* barrier) {
  List<Copy>& copies = block->copies;
  for (int i = 0; i < copies.count; i++)
    if (!barrier || copies.items[i].barrier == barrier) {
      Copy copy = copies.items[i];
      copies.items[i] = copies.items[--copies.count];
      carry_out(copy);
      return true;
    }
  return false;
}

static bool carry_out_any() {
  for (int b = 0; b < machine.cluster; b++)
    if (carry_out_one(&machine.blocks[b], nullptr)) return true;
  return false;
}

// ---- products ---------------------------------------------------------------------------------------------------

static float f16_value(u32 h) {
  u32 exponent = h & 0x7C00u;
  u32 bits = exponent == 0x7C00u ? 0x7F800000u | (h & 0x3FFu) << 13 : (h & 0x7FFFu) << 13;
  float f;
  memcpy(&f, &bits, 4);
  if (exponent != 0x7C00u) f *= 0x1p112f;
  return h & 0x8000u ? -f : f;
}
static float bf16_value(u32 h) {
  u32 bits = h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static float e4m3_value(u32 code) {
  u32 exponent = code >> 3 & 15u, mantissa = code & 7u;
  float f = exponent == 15 && mantissa == 7 ? NAN
            : exponent                      ? ldexpf(8.0f + (float)mantissa, (int)exponent - 10)
                                            : ldexpf((float)mantissa, -9);
  return code & 0x80u ? -f : f;
}
static const float* e4m3_values() {
  static float values[256];
  if (values[1] == 0.0f)
    for (u32 i = 0; i < 256; i++) values[i] = e4m3_value(i);
  return values;
}

// d[16][8] += a[16][k] b[k][8]; every product is exact in double.
__attribute__((optimize("O3"), no_sanitize("undefined"))) static void multiply(double* __restrict__ d,
                                                                               const float* __restrict__ a,
                                                                               const float* __restrict__ b, int k) {
  for (int row = 0; row < 16; row++)
    for (int i = 0; i < k; i++) {
      double x = a[row * k + i];
      for (int column = 0; column < 8; column++) d[row * 8 + column] += x * (double)b[i * 8 + column];
    }
}

struct Operands { float* d; u32 a[4], b[2]; };

template <class Decode> __attribute__((no_sanitize("undefined"))) static void mma(const char* operation, float* d,
                                                                                  u32 a0, u32 a1, u32 a2, u32 a3,
                                                                                  u32 b0, u32 b1, Decode decode) {
  Operands mine = {d, {a0, a1, a2, a3}, {b0, b1}};
  Fiber* f = machine.current;
  Operands* pointer = &mine;
  memcpy(f->warp->slots[f->warp->generation & 1][f->lane], &pointer, sizeof pointer);
  rendezvous(operation, [&] {
    double sums[16 * 8];
    float a[16 * 16], b[16 * 8];
    Operands* lanes[32];
    for (int lane = 0; lane < 32; lane++)
      memcpy(&lanes[lane], f->warp->slots[f->warp->generation & 1][lane], sizeof(void*));
    for (int lane = 0; lane < 32; lane++) {
      const Operands* o = lanes[lane];
      int r = lane >> 2, q = lane & 3;
      for (int half = 0; half < 2; half++) {
        for (int part = 0; part < 4; part++)
          a[(r + 8 * (part & 1)) * 16 + 8 * (part >> 1) + 2 * q + half] = decode(o->a[part] >> 16 * half & 0xFFFFu);
        for (int part = 0; part < 2; part++)
          b[(8 * part + 2 * q + half) * 8 + r] = decode(o->b[part] >> 16 * half & 0xFFFFu);
      }
      for (int i = 0; i < 4; i++) sums[(r + 8 * (i >> 1)) * 8 + 2 * q + (i & 1)] = o->d[i];
    }
    multiply(sums, a, b, 16);
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++)
        lanes[lane]->d[i] = (float)sums[((lane >> 2) + 8 * (i >> 1)) * 8 + 2 * (lane & 3) + (i & 1)];
  });
}

// Carries out the warp's oldest wgmma groups, all but `keep`. Every lane has the same groups, or the kernel is wrong.
__attribute__((no_sanitize("undefined"))) static void finish_products(Warp* w, int keep) {
  const float* e4m3 = e4m3_values();
  int count = 0;
  while (count < w->lanes[0]->products.count &&
         w->lanes[0]->products.items[count].group < w->lanes[0]->product_group - keep)
    count++;
  for (int lane = 0; lane < 32; lane++)
    if (w->lanes[lane]->products.count != w->lanes[0]->products.count ||
        w->lanes[lane]->product_group != w->lanes[0]->product_group)
      fail("wgmma_wait: lanes of the warp issued different products");
  for (int n = 0; n < count; n++) {
    const Product& all = w->lanes[0]->products.items[n];
    const int columns = all.bf16 ? 16 : 32, quarter = columns / 8;  // of a piece of 16 bytes: two quarters' columns
    float a[16 * 32], b[32 * 8];
    for (int lane = 0; lane < 32; lane++) {
      const Product& p = w->lanes[lane]->products.items[n];
      if (p.b != all.b || p.stride != all.stride) fail("wgmma: lanes of the warp name different descriptors");
      for (int part = 0; part < 4; part++)
        for (int i = 0; i < quarter; i++)
          a[((lane >> 2) + 8 * (part & 1)) * columns + columns / 2 * (part >> 1) + quarter * (lane & 3) + i] =
              all.bf16 ? bf16_value(p.a[part] >> 16 * i & 0xFFFFu) : e4m3[p.a[part] >> 8 * i & 255u];
    }
    for (int tile = 0; tile < all.tiles; tile++) {
      double sums[16 * 8] = {};
      for (int k = 0; k < columns; k++)
        for (int row = 0; row < 8; row++) {
          const u8* piece = all.b + tile * all.stride + k / (columns / 2) * 128 + row * 16;
          int in_piece = k % (columns / 2);
          b[k * 8 + row] = all.bf16 ? bf16_value(((const u16*)piece)[in_piece]) : e4m3[piece[in_piece]];
        }
      multiply(sums, a, b, columns);
      for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
          const Product& p = w->lanes[lane]->products.items[n];
          float* d = p.d + 4 * tile + i;
          double sum = sums[((lane >> 2) + 8 * (i >> 1)) * 8 + 2 * (lane & 3) + (i & 1)];
          *d = (float)(p.bf16 ? (p.first ? p.before[4 * tile + i] : *d) + sum : sum);
        }
    }
  }
  for (int lane = 0; lane < 32; lane++) w->lanes[lane]->products.drop_front(count);
}

// ---- compiled-in checks -----------------------------------------------------------------------------------------

// The compiler's -fsanitize=null,alignment,bounds,shift-exponent calls these.
struct Place { const char* file; u32 line, column; };
struct TypeName { u16 kind, info; char name[1]; };
struct Access { Place place; const TypeName* type; u8 log_alignment, kind; };
struct Indexing { Place place; const TypeName *array, *index; };
struct Shift { Place place; const TypeName *left, *right; };

[[noreturn]] static void fail_at(const Place& place, const char* what, u64 value, const TypeName* type) {
  machine.current->where = Where{place.file, (int)place.line};
  fail("%s %lld, type %s", what, (long long)value, type->name);
}

}  // namespace emulate

extern "C" {
#define CHECK __attribute__((visibility("hidden"), used, no_sanitize("undefined"))) void
CHECK __ubsan_handle_type_mismatch_v1(emulate::Access* access, u64 address) {
  if (!address) emulate::fail_at(access->place, "access through a null pointer,", 0, access->type);
  emulate::fail_at(access->place, "misaligned address", address, access->type);
}
CHECK __ubsan_handle_out_of_bounds(emulate::Indexing* indexing, u64 index) {
  emulate::fail_at(indexing->place, "index out of range:", index, indexing->array);
}
CHECK __ubsan_handle_shift_out_of_bounds(emulate::Shift* shift, u64, u64 by) {
  emulate::fail_at(shift->place, "shift by", by, shift->left);
}
#undef CHECK
}

namespace emulate {

// ---- a launch ---------------------------------------------------------------------------------------------------

static void finish() {
  Fiber* f = machine.current;
  Block* block = f->block;
  after = true;
  if (*(u64*)f->stack != CANARY) fail("its emulated stack of %zu bytes overflowed", STACK);
  if (f->copies.count) fail("ended with cp_async copies that nothing waited for");
  if (f->products.count) fail("ended with wgmma products that nothing waited for");
  if (f->cluster_arrived) fail("ended between cluster_arrive and cluster_wait");
  after = false;
  f->at = At::FINISHED;
  machine.polls = 0;
  block->alive--;
  machine.cluster_alive--;
  if (block->alive == 0) {
    if (block->copies.count)
      fail("the block ended with bulk copies in flight, the first to shared + %td",
           (u8*)block->copies.items[0].shared - block->shared);
    if (!block->waited)
      fail("no thread of the block called wait_for_dependencies: later kernels could overtake this one");
    for (size_t i = (size_t)machine.shared; i < shared_extent(); i++)
      if (block->shared[i] != 0xFF)
        fail("something was written at shared + %zu, behind the block's %d bytes", i, machine.shared);
    memset(block->shared, 0xFF, (size_t)machine.shared);
  } else if (block->meetings[0].arrived == block->alive) {
    release(block->meetings[0]);  // sync_block does not wait for threads that have ended
  }
  if (machine.cluster_alive && machine.cluster_arrived == machine.cluster_alive) release_cluster();
  if (machine.cluster_alive) suspend();
  Context ended;
  switch_context(ended, machine.main);
}

static void fiber_main() {
  machine.body(machine.params);
  finish();
  __builtin_unreachable();
}

static __thread bool running;
static struct sigaction previous_fault[2];

static void on_fault(int number, siginfo_t* info, void*) {
  if (!running) {  // not ours: as without this handler
    sigaction(number, &previous_fault[number == SIGBUS], nullptr);
    return;
  }
  after = true;
  fail("invalid access near address %p (an index out of range?)", info->si_addr);
}

static u8* shared_of(int rank) { return machine.memory + GUARD + (shared_extent() + GUARD) * (size_t)rank; }

static void* map(size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  return p;
}

static void reserve() {
  Machine& m = machine;
  int fibers = m.block * m.cluster;
  if (fibers > m.fiber_capacity) {
    if (m.fiber_capacity) {
      for (int i = 0; i < m.fiber_capacity; i++)
        free((void*)m.fibers[i].copies.items), free((void*)m.fibers[i].products.items);
      munmap(m.stacks, STACK * (size_t)m.fiber_capacity);
    }
    free((void*)m.fibers);
    free((void*)m.warps);
    m.fiber_capacity = fibers;
    m.fibers = (Fiber*)calloc((size_t)fibers, sizeof(Fiber));
    m.warps = (Warp*)aligned_alloc(64, (sizeof(Warp) * (size_t)fibers / 32 + 63) & ~(size_t)63);
    m.stacks = (u8*)map(STACK * (size_t)fibers, PROT_READ | PROT_WRITE);
  }
  size_t bytes = GUARD + (shared_extent() + GUARD) * (size_t)m.cluster;
  if (bytes != m.memory_bytes || shared_extent() != m.memory_extent) {
    if (m.memory_bytes) munmap(m.memory, m.memory_bytes);
    m.memory = (u8*)map(bytes, PROT_NONE);
    m.memory_bytes = bytes;
    m.memory_extent = shared_extent();
    for (int b = 0; b < m.cluster; b++) mprotect(shared_of(b), shared_extent(), PROT_READ | PROT_WRITE);
  }
}

static void run_cluster(int first_block) {
  Machine& m = machine;
  m.ready = m.cluster_waiting = Queue{};
  m.waiting = nullptr;
  m.cluster_arrived = 0;
  m.cluster_generation = 0;
  m.cluster_alive = m.block * m.cluster;
  m.polls = 0;
  for (int b = 0; b < m.cluster; b++) {
    Block& block = m.blocks[b];
    block.index = first_block + b;
    block.alive = m.block;
    block.waited = false;
    block.shared = shared_of(b);
    memset(block.shared, 0xFF, shared_extent());
    memset(block.meetings, 0, sizeof block.meetings);
    block.copies.count = 0;
    bool falling = ((u64)block.index + m.launches) & 1;
    for (int i = 0; i < m.block; i++) {
      int t = falling ? m.block - 32 - (i & ~31) + (i & 31) : i;
      int index = b * m.block + t;
      Fiber& f = m.fibers[index];
      Warp& warp = m.warps[index / 32];
      if (t % 32 == 0) memset((void*)&warp, 0, sizeof warp);
      List<Copy> copies = f.copies;
      List<Product> products = f.products;
      f = Fiber{};
      f.copies = copies;
      f.products = products;
      f.copies.count = f.products.count = 0;
      f.block = &block;
      f.warp = &warp;
      f.thread = (u32)t;
      f.lane = (u32)(t & 31);
      f.stack = m.stacks + STACK * (size_t)index;
      *(u64*)f.stack = CANARY;
      // Tops at different offsets, so that all the stacks do not share a few cache sets.
      make_context(f.context, f.stack, STACK - 192 * (size_t)(index % 31), fiber_main);
      warp.lanes[f.lane] = &f;
      m.ready.push(&f);
    }
  }
  Fiber* f = m.ready.pop();
  m.current = f;
  threadIdx.x = f->thread;
  blockIdx.x = (u32)f->block->index;
  switch_context(m.main, f->context);
}

// Runs a grid; null, or what went wrong (valid until the next launch).
static const char* launch(const char* kernel, int bound, void (*body)(const void*), const void* params, int grid,
                          int block, int shared, int cluster) {
  Machine& m = machine;
  m.kernel = kernel;
  m.body = body;
  m.params = params;
  m.grid = grid;
  m.block = block;
  m.shared = shared;
  m.cluster = cluster;
  m.used = 0;
  m.failed = after = false;
  m.coin = m.launches++;
  if (block > bound) {
    say("kernel %s: launched with %d threads, its launch bound is %d", kernel, block, bound);
    return m.message;
  }
  reserve();
  threadIdx = blockIdx = Index3{0, 0, 0};
  blockDim = Index3{(u32)block, 1, 1};
  gridDim = Index3{(u32)grid, 1, 1};
  static u8* signal_stack;
  if (!signal_stack) signal_stack = (u8*)map(STACK, PROT_READ | PROT_WRITE);
  stack_t own = {}, before = {};
  own.ss_sp = signal_stack;
  own.ss_size = STACK;
  sigaltstack(&own, &before);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // left by a switch, not by a return
  sigaction(SIGSEGV, &action, &previous_fault[0]);
  sigaction(SIGBUS, &action, &previous_fault[1]);
  running = true;
  for (int first = 0; first < grid && !m.failed; first += cluster) run_cluster(first);
  running = false;
  sigaction(SIGSEGV, &previous_fault[0], nullptr);
  sigaction(SIGBUS, &previous_fault[1], nullptr);
  sigaltstack(&before, nullptr);
  return m.failed ? m.message : nullptr;
}

// A coin that falls the same way in every run of a program.
static bool coin() {
  machine.coin = machine.coin * 6364136223846793005ull + 1442695040888963407ull;
  return machine.coin >> 40 & 1;
}

}  // namespace emulate

#define KERNEL(name, Params, threads, blocks_per_sm)                                                                 \
  static void name(const Params& p);                                                                                 \
  static void flashstep_body_##name(const void* p) { name(*(const Params*)p); }                                      \
  extern "C" __attribute__((visibility("default"))) const char* flashstep_launch_##name(                             \
      const void* p, int grid, int block, int shared, int cluster) {                                                 \
    return emulate::launch(#name, threads, flashstep_body_##name, p, grid, block, shared, cluster);                  \
  }                                                                                                                  \
  static void name(const Params& p)

// ---- threads ----------------------------------------------------------------------------------------------------

DEVICE u8* shared_memory() { return emulate::machine.current->block->shared; }
DEVICE void sync_block(WHERE) {
  emulate::note(where);
  emulate::meet(0, emulate::machine.current->block->alive, emulate::At::BLOCK);
}
DEVICE void sync_warp(WHERE) { emulate::note(where); emulate::rendezvous("sync_warp", [] {}); }
DEVICE void sync_some(int id, int threads, WHERE) {
  emulate::note(where);
  if (id < 1 || id > 15 || threads <= 0 || threads % 32)
    emulate::fail("sync_some(%d, %d): id 1..15, whole warps", id, threads);
  emulate::meet(id, threads, emulate::At::SOME);
}
template <class T> DEVICE T shuffle(T value, int lane, WHERE) {
  emulate::note(where);
  return emulate::exchange("shuffle", value, [=](int) { return lane; });
}
template <class T> DEVICE T shuffle_xor(T value, int mask, WHERE) {
  emulate::note(where);
  return emulate::exchange("shuffle_xor", value, [=](int me) { return me ^ mask; });
}
template <class T> DEVICE T shuffle_up(T value, int delta, WHERE) {
  emulate::note(where);
  return emulate::exchange("shuffle_up", value, [=](int me) { return me < delta ? me : me - delta; });
}
DEVICE u32 warp_max_u32(u32 value, WHERE) {
  for (int mask = 16; mask; mask >>= 1) {
    u32 other = shuffle_xor(value, mask, where);
    value = value > other ? value : other;
  }
  return value;
}
DEVICE u32 ballot(bool predicate, WHERE) {
  emulate::note(where);
  emulate::Fiber* f = emulate::machine.current;
  u32& bits = f->warp->bits[f->warp->generation & 1];
  if (!f->warp->arrived) bits = 0;
  bits |= (u32)predicate << f->lane;
  emulate::rendezvous("ballot", [] {});
  return bits;
}
DEVICE int count_bits(u32 x) { return __builtin_popcount(x); }
DEVICE int leading_zeros(u32 x) { return x ? __builtin_clz(x) : 32; }
DEVICE int lowest_bit(u32 x) { return __builtin_ffs((int)x) - 1; }

DEVICE void launch_dependents() {}
DEVICE void wait_for_dependencies() { emulate::machine.current->block->waited = true; }

// ---- clusters ---------------------------------------------------------------------------------------------------

DEVICE int cluster_rank() { return emulate::machine.current->block->index % emulate::machine.cluster; }
DEVICE void cluster_arrive(WHERE) {
  emulate::note(where);
  emulate::Fiber* f = emulate::machine.current;
  if (f->cluster_arrived) emulate::fail("cluster_arrive twice without cluster_wait");
  f->cluster_arrived = true;
  f->cluster_generation = emulate::machine.cluster_generation;
  if (++emulate::machine.cluster_arrived == emulate::machine.cluster_alive) emulate::release_cluster();
}
DEVICE void cluster_wait(WHERE) {
  emulate::note(where);
  emulate::Fiber* f = emulate::machine.current;
  if (!f->cluster_arrived) emulate::fail("cluster_wait without cluster_arrive");
  f->cluster_arrived = false;
  if (emulate::machine.cluster_generation != f->cluster_generation) return;
  f->at = emulate::At::CLUSTER;
  emulate::machine.cluster_waiting.push(f);
  emulate::suspend();
}
DEVICE void cluster_sync(WHERE) { cluster_arrive(where); cluster_wait(where); }
template <class T> DEVICE T* cluster_map(T* p, int rank, WHERE) {
  emulate::note(where);
  if (rank < 0 || rank >= emulate::machine.cluster)
    emulate::fail("cluster_map: rank %d of %d", rank, emulate::machine.cluster);
  emulate::check_shared("cluster_map", p, sizeof(T), 1);
  return (T*)(emulate::machine.blocks[rank].shared + ((const u8*)p - shared_memory()));
}

// ---- memory -----------------------------------------------------------------------------------------------------

DEVICE uint4 load_stream(const void* p, WHERE) {
  emulate::note(where);
  emulate::check_global("load_stream", p, 16);
  return *(const uint4*)p;
}
template <class T> DEVICE T load_l2(const T* p, WHERE) {
  emulate::note(where);
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "load_l2: 2, 4, 8 or 16 bytes");
  emulate::check_global("load_l2", p, sizeof(T));
  return *p;
}
DEVICE u32 load_acquire(const u32* p, WHERE) { emulate::note(where); emulate::poll(); return *p; }
DEVICE u32 load_acquire_system(const u32* p, WHERE) { emulate::note(where); emulate::poll(); return *p; }
DEVICE void store_release(u32* p, u32 v) { emulate::machine.polls = 0; *p = v; }
DEVICE void store_release_system(u32* p, u32 v) { emulate::machine.polls = 0; *p = v; }
DEVICE uint4 load_volatile(const uint4* p, WHERE) {
  emulate::note(where);
  emulate::check_global("load_volatile", p, 16);
  emulate::poll();
  return *p;
}
DEVICE void store_volatile(uint4* p, uint4 v, WHERE) {
  emulate::note(where);
  emulate::check_global("store_volatile", p, 16);
  emulate::machine.polls = 0;
  *p = v;
}
DEVICE u32 add_atomic(u32* p, u32 v) { emulate::machine.polls = 0; u32 old = *p; *p = old + v; return old; }
DEVICE u32 max_atomic(u32* p, u32 v) { u32 old = *p; if (v > old) *p = v; return old; }
DEVICE u64 max_atomic(u64* p, u64 v) { u64 old = *p; if (v > old) *p = v; return old; }
DEVICE void add_release(u32* p, u32 v) { add_atomic(p, v); }
DEVICE u32 or_atomic(u32* p, u32 v) { u32 old = *p; *p = old | v; return old; }
DEVICE void fence_device() {}
DEVICE void wait_value(const int* shared, int value, WHERE) {
  emulate::note(where);
  while (*(const volatile int*)shared != value) emulate::poll();
}
DEVICE void relax(WHERE) { emulate::note(where); emulate::poll(); }

// ---- asynchronous copies ----------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - shared_memory()); }
DEVICE void cp_async16(void* shared, const void* global, WHERE) {
  emulate::note(where);
  emulate::check_shared("cp_async16", shared, 16, 16);
  emulate::check_global("cp_async16", global, 16);
  emulate::Fiber* f = emulate::machine.current;
  f->copies.add() = emulate::Copy{shared, global, 16, nullptr, f->copy_group};
}
DEVICE void cp_async_commit() { emulate::machine.current->copy_group++; }
template <int N> DEVICE void cp_async_wait() {
  emulate::Fiber* f = emulate::machine.current;
  int done = 0;
  for (; done < f->copies.count && f->copies.items[done].group < f->copy_group - N; done++)
    memcpy(f->copies.items[done].shared, f->copies.items[done].global, 16);
  f->copies.drop_front(done);
}

DEVICE void barrier_init(u64* b, int arrivals, WHERE) {
  emulate::note(where);
  emulate::check_shared("barrier_init", b, 8, 8);
  if (arrivals < 1 || arrivals > 8191) emulate::fail("barrier_init: %d arrivals", arrivals);
  emulate::Barrier barrier = {emulate::BARRIER_MARK, 0, (u64)arrivals, (u64)arrivals, 0};
  memcpy(b, &barrier, 8);
}
DEVICE void barrier_init_fence() {}
DEVICE void barrier_expect(u64* b, u32 bytes, WHERE) {
  emulate::note(where);
  emulate::arrive("barrier_expect", b, bytes);
}
DEVICE void barrier_arrive(u64* b, WHERE) { emulate::note(where); emulate::arrive("barrier_arrive", b, 0); }
DEVICE void barrier_wait(u64* b, u32 parity, WHERE) {
  emulate::note(where);
  emulate::Fiber* f = emulate::machine.current;
  if (parity > 1) emulate::fail("barrier_wait: parity %u", parity);
  while (emulate::read_barrier("barrier_wait", b).phase == parity) {
    if (emulate::carry_out_one(f->block, b)) continue;
    f->at = emulate::At::BARRIER;
    f->barrier = b;
    f->parity = parity;
    f->next = emulate::machine.waiting;
    emulate::machine.waiting = f;
    emulate::suspend();
  }
}
DEVICE void cluster_store(float* to, int rank, float value, u64* b, WHERE) {
  u64* barrier = cluster_map(b, rank, where);
  emulate::check_shared("cluster_store", to, 4, 4);
  emulate::read_barrier("cluster_store", b);
  emulate::carry_out(emulate::Copy{cluster_map(to, rank, where), &value, 4, barrier, 0});
}
DEVICE void cluster_store(float4* to, int rank, float4 value, u64* b, WHERE) {
  u64* barrier = cluster_map(b, rank, where);
  emulate::check_shared("cluster_store", to, 16, 16);
  emulate::read_barrier("cluster_store", b);
  emulate::carry_out(emulate::Copy{cluster_map(to, rank, where), &value, 16, barrier, 0});
}
DEVICE void bulk_copy(void* shared, const void* global, u32 bytes, u64* b, WHERE) {
  emulate::note(where);
  emulate::check_shared("bulk_copy", shared, bytes, 16);
  emulate::check_global("bulk_copy", global, 16);
  if (bytes % 16) emulate::fail("bulk_copy: %u bytes, not a multiple of 16", bytes);
  emulate::read_barrier("bulk_copy", b);
  emulate::Copy copy = {shared, global, bytes, b, 0};
  if (emulate::coin()) emulate::carry_out(copy);
  else emulate::machine.current->block->copies.add() = copy;
}
DEVICE u64 evict_first_policy() { return 0; }
DEVICE void bulk_copy(void* shared, const void* global, u32 bytes, u64* b, u64, WHERE) {
  bulk_copy(shared, global, bytes, b, where);
}
DEVICE void prefetch_l2(const void* global, u32 bytes, WHERE) {
  emulate::note(where);
  emulate::check_global("prefetch_l2", global, 16);
  if (bytes % 16) emulate::fail("prefetch_l2: %u bytes, not a multiple of 16", bytes);
}
DEVICE void fence_async() {}
DEVICE void fence_async_device() {}

// ---- products ---------------------------------------------------------------------------------------------------

DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, WHERE) {
  emulate::note(where);
  emulate::mma("mma_f16", d, a0, a1, a2, a3, b0, b1, emulate::f16_value);
}
DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, WHERE) {
  emulate::note(where);
  emulate::mma("mma_bf16", d, a0, a1, a2, a3, b0, b1, emulate::bf16_value);
}
DEVICE u64 wgmma_descriptor(const void* fragment, u32 tile_stride = 256, WHERE) {
  emulate::note(where);
  emulate::check_shared("wgmma_descriptor", fragment, 256, 16);
  return (u64)((const u8*)fragment - shared_memory()) | (u64)tile_stride << 32;
}
DEVICE u64 wgmma_further(u64 descriptor, u32 bytes, WHERE) {
  emulate::note(where);
  if (bytes % 16) emulate::fail("wgmma_further: %u bytes, not a multiple of 16", bytes);
  return descriptor + bytes;
}
DEVICE void wgmma_begin(WHERE) {
  emulate::note(where);
  emulate::rendezvous("wgmma_begin", [] {});
  emulate::machine.current->products_open = true;
}
namespace emulate {
static void add_product(float* d, int size, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool bf16) {
  Fiber* f = machine.current;
  if (!f->products_open) fail("wgmma outside wgmma_begin ... wgmma_commit");
  if (machine.block % 128) fail("wgmma needs whole warpgroups of 128 threads");
  const u8* fragment = shared_memory() + (u32)b;
  int stride = (int)(b >> 32), tiles = size / 4;
  check_shared("wgmma", fragment + (tiles - 1) * stride, 256, 16);
  bool first = true;
  for (int i = 0; i < f->products.count; i++) first = first && f->products.items[i].d != d;
  Product& p = f->products.add();
  p = Product{d, {a0, a1, a2, a3}, fragment, stride, tiles, f->product_group, bf16, first, {}};
  for (int i = 0; i < size; i++) p.before[i] = d[i], d[i] = NAN;
}
}  // namespace emulate
template <int N> DEVICE void wgmma_e4m3(float (&d)[N], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, WHERE) {
  emulate::note(where);
  emulate::add_product(d, N, a0, a1, a2, a3, b, false);
}
template <int N> DEVICE void wgmma_bf16(float (&d)[N], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, WHERE) {
  emulate::note(where);
  emulate::add_product(d, N, a0, a1, a2, a3, b, true);
}
DEVICE void wgmma_commit() {
  emulate::Fiber* f = emulate::machine.current;
  f->products_open = false;
  f->product_group++;
}
template <int N> DEVICE void wgmma_wait(WHERE) {
  emulate::note(where);
  emulate::Fiber* f = emulate::machine.current;
  emulate::rendezvous("wgmma_wait", [=] { emulate::finish_products(f->warp, N); });
}

// ---- conversions ------------------------------------------------------------------------------------------------

DEVICE float as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
DEVICE u32 as_bits(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
DEVICE u32 e4m3x2_to_f16x2(u32 codes) {
  u32 pair = 0;
  for (int i = 0; i < 2; i++) {
    u32 code = codes >> 8 * i & 255u, exponent = code >> 3 & 15u, mantissa = code & 7u, half;
    if ((code & 127u) == 127u) half = 0x7FFFu;  // NaN
    else if (exponent) half = (exponent + 8u) << 10 | mantissa << 7;
    else if (!mantissa) half = 0;
    else {
      u32 shift = (u32)__builtin_clz(mantissa) - 28u;  // 1..3: what brings the leading bit to bit 3
      half = (9u - shift) << 10 | (mantissa << shift & 7u) << 7;
    }
    if ((code & 127u) != 127u) half |= (code & 128u) << 8;
    pair |= half << 16 * i;
  }
  return pair;
}
DEVICE u16 f32_to_bf16(float x) {
  u32 bits = as_bits(x);
  if (x != x) return 0x7FFF;
  return (u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
DEVICE u32 f32x2_to_bf16x2(float low, float high) { return f32_to_bf16(low) | (u32)f32_to_bf16(high) << 16; }
DEVICE u16 f32x2_to_e4m3x2(float low, float high) {
  u32 codes[2];
  for (int i = 0; i < 2; i++) {
    float x = i ? high : low, a = fabsf(x);
    u32 bits = as_bits(a), code;
    if (x != x) { codes[i] = 0x7F; continue; }
    if (a < 0x1p-6f) code = (u32)rintf(a * 512.0f);
    else code = a >= 448.0f ? 0x7Eu : ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    codes[i] = code | (as_bits(x) >> 31) << 7;
  }
  return (u16)(codes[0] | codes[1] << 8);
}
DEVICE u32 f16x2_to_f32_low(u32 pair) { return as_bits(emulate::f16_value(pair & 0xFFFFu)); }
DEVICE u32 f16x2_to_f32_high(u32 pair) { return as_bits(emulate::f16_value(pair >> 16)); }
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 pair = 0;
  for (int i = 0; i < 2; i++) {
    double exact =
        (double)emulate::bf16_value(a >> 16 * i & 0xFFFFu) * (double)emulate::bf16_value(b >> 16 * i & 0xFFFFu);
    float f = (float)exact;
    // Rounded to odd, so that rounding again to bf16 is as if done once (matters below float32's normal range).
    if (f == f && (double)f != exact && !(as_bits(f) & 1u) && !isinf(f))
      f = as_float((fabs((double)f) > fabs(exact)) ? as_bits(f) - 1u : as_bits(f) + 1u);
    pair |= (u32)f32_to_bf16(f) << 16 * i;
  }
  return pair;
}
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= ((u32)(bytes >> 8 * (selector >> 4 * i & 7u)) & 255u) << 8 * i;
  return out;
}
DEVICE u32 multiply_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
DEVICE float exp_fast(float x) { return expf(x); }
DEVICE float divide_fast(float a, float b) { return a / b; }
DEVICE float sqrt_fast(float x) { return sqrtf(x); }
DEVICE float exp_accurate(float x) { return expf(x); }
DEVICE float log_accurate(float x) { return logf(x); }
DEVICE void sincos_accurate(float angle, float* s, float* c) { *s = sinf(angle); *c = cosf(angle); }
