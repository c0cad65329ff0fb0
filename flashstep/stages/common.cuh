// What every kernel needs from the machine: the only inline PTX of the package.
//
// A kernel is written once, against the functions of this file. Compiled by NVRTC they are PTX for SM90 and later;
// compiled with -DFLASHSTEP_EMULATE they come from emulate.h, which runs the same text on a CPU, thread by thread.
// So that both work: shared memory is dynamic and laid over by a struct (`shared_memory()`), blocks have one
// dimension, warp functions are called by all 32 lanes, and nothing but this file names an instruction.
//
// Operand layouts of products, used by every stage:
// - activations ("fragments"): [tile of 8 rows][16-byte piece of K][8 rows][16 B], fp8 (16 columns a piece) or
//   bf16 (8 columns a piece). A piece of 128 B is a core matrix of wgmma; `fragment_offset` finds a byte. fp8 carries
//   UE8M0 codes [tile of 8 rows][K / 32][8 rows].
// - weights ("units"): 16 rows x 32 columns of fp8, or 16 x 16 of bf16: 512 B, lane l's 16 bytes are the four
//   registers a0..a3 of mma.m16n8k32 / m16n8k16. With r = l / 4, q = l % 4 and fp8: a0 = W[r][4q..4q+3],
//   a1 = W[r + 8][4q..], a2 = W[r][16 + 4q..], a3 = W[r + 8][16 + 4q..]; bf16 likewise with pairs and 8 for 16.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef u16 bf16;  // the bits of a bfloat16

#ifdef FLASHSTEP_EMULATE
#include "emulate.h"
#else

#define KERNEL(name, Params, threads, blocks_per_sm) \
  extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm) name(const __grid_constant__ Params p)
#define DEVICE __device__ __forceinline__

// ---- threads ----------------------------------------------------------------------------------------------------

DEVICE u8* shared_memory() {  // the dynamic shared memory of the block, aligned to 1024 bytes
  extern __shared__ __align__(1024) u8 flashstep_shared[];
  return flashstep_shared;
}
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// `threads` threads (whole warps) meet at barrier `id` 1..15.
DEVICE void sync_some(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
template <class T> DEVICE T shuffle(T value, int lane) { return __shfl_sync(~0u, value, lane); }
template <class T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
template <class T> DEVICE T shuffle_up(T value, int delta) { return __shfl_up_sync(~0u, value, delta); }
DEVICE u32 warp_max_u32(u32 value) { return __reduce_max_sync(~0u, value); }
DEVICE u32 ballot(bool predicate) { return __ballot_sync(~0u, predicate); }
DEVICE int count_bits(u32 x) { return __popc(x); }
DEVICE int leading_zeros(u32 x) { return __clz(x); }
DEVICE int lowest_bit(u32 x) { return __ffs(x) - 1; }  // -1 of 0

// Programmatic dependent launch: let the next kernel of the stream start; wait until the previous one is complete.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- clusters ---------------------------------------------------------------------------------------------------

DEVICE int cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return (int)r; }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() { cluster_arrive(); cluster_wait(); }
// The address, in block `rank` of the cluster, of what is at `p` in this block's shared memory.
template <class T> DEVICE T* cluster_map(T* p, int rank) {
  u64 out;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(out) : "l"((u64)p), "r"(rank));
  return (T*)out;
}

// ---- memory -----------------------------------------------------------------------------------------------------

// Read once, never written during the kernel (weights): past L1. Not ".nc": ptxas moves such loads behind
// griddepcontrol.wait, where all that was to come meanwhile is waited for.
DEVICE uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// Written by an earlier kernel, perhaps on another multiprocessor: from L2. T is 2, 4, 8 or 16 bytes wide.
template <class T> DEVICE T load_l2(const T* p) { return __ldcg(p); }
DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE u32 load_acquire_system(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release_system(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE uint4 load_volatile(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void store_volatile(uint4* p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DEVICE u32 add_atomic(u32* p, u32 v) { return atomicAdd(p, v); }   // global or shared; returns the old value
DEVICE u32 max_atomic(u32* p, u32 v) { return atomicMax(p, v); }
DEVICE u64 max_atomic(u64* p, u64 v) { return atomicMax(p, v); }
// Adds, after all that this thread has written or learned of at a barrier has become visible to the device.
DEVICE void add_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE u32 or_atomic(u32* p, u32 v) { return atomicOr(p, v); }
DEVICE void fence_device() { __threadfence(); }
DEVICE void wait_value(const int* shared, int value) {  // until another thread of the block has stored it
  while (*(const volatile int*)shared != value) {
  }
}
DEVICE void relax() { __nanosleep(20); }  // inside a loop that polls

// ---- asynchronous copies ----------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void cp_async16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Barriers in shared memory. `barrier_expect` arrives once and adds bytes that copies will bring.
DEVICE void barrier_init(u64* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_fence() {  // then sync_block
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
DEVICE void barrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void barrier_wait(u64* b, u32 parity) {
  asm volatile("{\n.reg .pred P;\nW_%=: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@!P bra W_%=;\n}"
               :
               : "r"(shared_address(b)), "r"(parity)
               : "memory");
}
// Store `value` where `to` lies in block `rank` of the cluster, and count its 4 bytes as come on `b` of that block: of a
// barrier of which the block expects them, and by waiting for which it sees them.
DEVICE void cluster_store(float* to, int rank, float value, u64* b) {
  asm volatile(
      "{\n.reg .u32 to, bar;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 bar, %1, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %2, [bar];\n}" ::"r"(shared_address(to)),
      "r"(shared_address(b)), "f"(value), "r"(rank)
      : "memory");
}
DEVICE void cluster_store(float4* to, int rank, float4 value, u64* b) {  // likewise, 16 bytes
  asm volatile(
      "{\n.reg .u32 to, bar;\nmapa.shared::cluster.u32 to, %0, %6;\nmapa.shared::cluster.u32 bar, %1, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%2,%3,%4,%5}, [bar];\n}" ::"r"(
          shared_address(to)),
      "r"(shared_address(b)), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(rank)
      : "memory");
}
// Bulk copies: addresses and byte counts are multiples of 16.
DEVICE void bulk_copy(void* shared, const void* global, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(b))
               : "memory");
}
DEVICE u64 evict_first_policy() {
  u64 p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
DEVICE void bulk_copy(void* shared, const void* global, u32 bytes, u64* b, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :
      : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(b)), "l"(policy)
      : "memory");
}
DEVICE void prefetch_l2(const void* global, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// Shared memory written by ordinary stores, read next by bulk copies or wgmma: by each writer, before the barrier.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Device memory written by ordinary stores of this kernel, read next by bulk copies: by who copies, once it has acquired.
DEVICE void fence_async_device() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- products ---------------------------------------------------------------------------------------------------

// d += a b: m16n8k16, float32 accumulators. Lane l holds d[0], d[1] = D[l / 4][2 (l % 4) + 0, 1], d[2], d[3] = row + 8.
DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA 1
// A 64 x 32 (e4m3) or 64 x 16 (bf16) from registers (a warp's 16 rows as in mma m16n8k32 or m16n8k16); B from shared
// memory, 1 to 6 tiles of 8 rows: of each two core matrices beside each other (`wgmma_descriptor`: where the first tile
// is, and from tile to tile). d[4 t + i] is accumulator i of mma for tile t. e4m3: d = a b; bf16: d += a b. Order:
// wgmma_begin, products, wgmma_commit, wgmma_wait.
DEVICE u64 wgmma_descriptor(const void* fragment, u32 tile_stride = 256) {
  u64 a = (u64)((shared_address(fragment) & 0x3FFFF) >> 4);
  return a | ((u64)(128 >> 4) << 16) | ((u64)(tile_stride >> 4) << 32);
}
// The same, `bytes` (a multiple of 16) further on: one addition, since addresses do not reach the upper half.
DEVICE u64 wgmma_further(u64 descriptor, u32 bytes) {
  return (descriptor & 0xFFFFFFFF00000000ull) | ((u32)descriptor + (bytes >> 4));
}
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
#define WGMMA_D1(c) c(d[0]), c(d[1]), c(d[2]), c(d[3])
#define WGMMA_D2(c) WGMMA_D1(c), c(d[4]), c(d[5]), c(d[6]), c(d[7])
#define WGMMA_D3(c) WGMMA_D2(c), c(d[8]), c(d[9]), c(d[10]), c(d[11])
#define WGMMA_D4(c) WGMMA_D3(c), c(d[12]), c(d[13]), c(d[14]), c(d[15])
#define WGMMA_D5(c) WGMMA_D4(c), c(d[16]), c(d[17]), c(d[18]), c(d[19])
#define WGMMA_D6(c) WGMMA_D5(c), c(d[20]), c(d[21]), c(d[22]), c(d[23])
#define WGMMA_R1 "{%0,%1,%2,%3"
#define WGMMA_R2 WGMMA_R1 ",%4,%5,%6,%7"
#define WGMMA_R3 WGMMA_R2 ",%8,%9,%10,%11"
#define WGMMA_R4 WGMMA_R3 ",%12,%13,%14,%15"
#define WGMMA_R5 WGMMA_R4 ",%16,%17,%18,%19"
#define WGMMA_R6 WGMMA_R5 ",%20,%21,%22,%23"
#define WGMMA_WRITES(x) "=f"(x)
#define WGMMA_ADDS(x) "+f"(x)
#define WGMMA(tiles, shape, scale, ab, last, c)                                                                 \
  if constexpr (N == 4 * tiles)                                                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " scale ", 0;\nwgmma.mma_async.sync.aligned." shape " " WGMMA_R##tiles \
               "}, " ab ", p, 1, 1" last ";\n}"                                                                 \
               : WGMMA_D##tiles(c) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))
#define WGMMA_ALL(k, type, scale, last, c)                                               \
  WGMMA(1, "m64n8" k type, scale, "{%4,%5,%6,%7}, %8", last, c);                         \
  WGMMA(2, "m64n16" k type, scale, "{%8,%9,%10,%11}, %12", last, c);                     \
  WGMMA(3, "m64n24" k type, scale, "{%12,%13,%14,%15}, %16", last, c);                   \
  WGMMA(4, "m64n32" k type, scale, "{%16,%17,%18,%19}, %20", last, c);                   \
  WGMMA(5, "m64n40" k type, scale, "{%20,%21,%22,%23}, %24", last, c);                   \
  WGMMA(6, "m64n48" k type, scale, "{%24,%25,%26,%27}, %28", last, c)
template <int N> DEVICE void wgmma_e4m3(float (&d)[N], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  WGMMA_ALL("k32", ".f32.e4m3.e4m3", "0", "", WGMMA_WRITES);
}
template <int N> DEVICE void wgmma_bf16(float (&d)[N], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  WGMMA_ALL("k16", ".f32.bf16.bf16", "1", ", 0", WGMMA_ADDS);
}
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
#endif

// ---- conversions ------------------------------------------------------------------------------------------------

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
DEVICE u32 e4m3x2_to_f16x2(u32 codes) {  // the low 16 bits: two codes
  u32 r; u16 h = (u16)codes;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(h));
  return r;
}
DEVICE u16 f32_to_bf16(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DEVICE u32 f32x2_to_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u16 f32x2_to_e4m3x2(float low, float high) {  // nearest even, saturating
  u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low)); return r;
}
DEVICE u32 f16x2_to_f32_low(u32 pair) {
  u32 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=r"(r) : "r"(pair));
  return r;
}
DEVICE u32 f16x2_to_f32_high(u32 pair) {
  u32 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=r"(r) : "r"(pair));
  return r;
}
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Bytes of b:a (0 is the lowest of a) that the nibbles of `selector` name; of a nibble the top bit is not looked at.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
DEVICE float exp_fast(float x) { return __expf(x); }
// To about 2 units in the last place, without the branches of exact ones.
DEVICE float divide_fast(float a, float b) { return __fdividef(a, b); }
DEVICE float sqrt_fast(float x) { float r; asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE float exp_accurate(float x) { return expf(x); }
DEVICE float log_accurate(float x) { return logf(x); }
DEVICE void sincos_accurate(float angle, float* s, float* c) { sincosf(angle, s, c); }

#endif  // FLASHSTEP_EMULATE

// ---- shared by both machines ------------------------------------------------------------------------------------

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }
DEVICE float bf16_to_f32(u16 x) { return as_float((u32)x << 16); }
DEVICE float bf16x2_low(u32 pair) { return as_float(pair << 16); }
DEVICE float bf16x2_high(u32 pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE float round_bf16(float x) { return bf16_to_f32(f32_to_bf16(x)); }
DEVICE float e4m3_to_f32(u32 code) { return as_float(f16x2_to_f32_low(e4m3x2_to_f16x2(code & 255u))); }

// 2^(code - 127); code 0 is the subnormal 2^-127.
DEVICE float ue8m0_to_f32(u32 code) { return as_float(code ? code << 23 : 1u << 22); }
// 2^(a + b - 254) of two UE8M0 codes, for the product of two scales; flushes what float32 cannot hold to 0 or infinity.
DEVICE float ue8m0_product(u32 a, u32 b) {
  int e = (int)a + (int)b - 127;
  return e >= 255 ? as_float(0x7F800000u) : e > 0 ? as_float((u32)e << 23) : e > -23 ? as_float(1u << (22 + e)) : 0.0f;
}
// UE8M0 code of the scale of a group: the power of two not below max(amax, 1e-4) / 448 (section 3).
DEVICE u32 fp8_scale_code(float amax) { return (as_bits(fmaxf(amax, 1e-4f) * (1.0f / 448.0f)) + 0x7FFFFFu) >> 23; }
// UE8M0 code of the scale of a group of 32 index values: the power of two not below max(amax, 6 * 2^-126) / 6.
DEVICE u32 fp4_scale_code(float amax) {
  return (as_bits(fmaxf(amax, 6.0f * 1.17549435e-38f) * (1.0f / 6.0f)) + 0x7FFFFFu) >> 23;
}
// 1 / scale is exact for a power of two: x * fp8_inverse(code) is x / scale (codes 1..252).
DEVICE float ue8m0_inverse(u32 code) { return as_float((254u - code) << 23); }
// e2m1 code (sign in bit 3) of x: nearest, ties to the even code, saturating at 6.
DEVICE u32 f32_to_e2m1(float x) {
  float a = fabsf(x);
  u32 c = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return c | ((as_bits(x) >> 31) << 3);
}
DEVICE float e2m1_to_f32(u32 code) {
  u32 m = code & 7u;
  float v = m < 2 ? 0.5f * (float)m : as_float(((126u + (m >> 1)) << 23) | ((m & 1u) << 22));
  return (code & 8u) ? -v : v;
}
// Eight e2m1 codes as e4m3: the low nibbles of the four bytes, and the high ones. Each value is 2^-6 of the e2m1 value.
DEVICE u32 e2m1_low_to_e4m3(u32 w) { return ((w << 2) & 0x1c1c1c1cu) | ((w << 4) & 0x80808080u); }
DEVICE u32 e2m1_high_to_e4m3(u32 w) { return ((w >> 2) & 0x1c1c1c1cu) | (w & 0x80808080u); }
// e4m3 pair (low 16 bits) as bf16 pair, exactly.
DEVICE u32 e4m3x2_to_bf16x2(u32 codes) {
  u32 spread = permute_bytes(codes, 0, 0x1404);  // byte 0 -> bits 15..8, byte 1 -> 31..24
  u32 bits = (spread & 0x80008000u) | ((spread >> 4) & 0x07F007F0u);  // exponent and mantissa where bf16 has them
  return multiply_bf16x2(bits, 0x7B807B80u);                                     // 2^120: the difference of the biases
}
// Byte offset in a fragment array of row `row` and byte `k_byte` of the row's K, whose pieces are `pieces` a row.
DEVICE u32 fragment_offset(int row, int k_byte, int pieces) {
  return (u32)((((row >> 3) * pieces + (k_byte >> 4)) * 8 + (row & 7)) * 16 + (k_byte & 15));
}
template <class T> DEVICE T warp_sum(T v) {
#pragma unroll
  for (int m = 16; m; m >>= 1) v += shuffle_xor(v, m);
  return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
  for (int m = 16; m; m >>= 1) v = fmaxf(v, shuffle_xor(v, m));
  return v;
}
// A router's score of a logit, sqrt(log(1 + e^x)). The logarithm of 1 + t by its series in t / (2 + t) <= 1 / 3: to
// float32 accuracy for every t.
DEVICE float sqrt_softplus(float x) {
  float t = exp_accurate(-fabsf(x)), z = divide_fast(t, 2.0f + t), y = z * z;
  float series = 1.0f / 15.0f;
  series = fmaf(series, y, 1.0f / 13.0f);
  series = fmaf(series, y, 1.0f / 11.0f);
  series = fmaf(series, y, 1.0f / 9.0f);
  series = fmaf(series, y, 1.0f / 7.0f);
  series = fmaf(series, y, 1.0f / 5.0f);
  series = fmaf(series, y, 1.0f / 3.0f);
  series = fmaf(series, y, 1.0f);
  return sqrt_fast(fmaxf(x, 0.0f) + 2.0f * z * series);
}
