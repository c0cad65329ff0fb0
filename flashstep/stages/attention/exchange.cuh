// What attention needs of the machine beyond common.cuh: matrices from shared memory in the lanes' order, stores into
// another block that count towards its barrier, and an arrival at the cluster's barrier that orders nothing.
#pragma once
#include "common.cuh"

#ifdef FLASHSTEP_EMULATE

// Lane l names row l % 8 (16 bytes) of matrix l / 8; d[m] is words l % 4 of row l / 4 of matrix m.
DEVICE void load_matrices(u32 (&d)[4], const void* row, WHERE) {
  emulate::check_shared("load_matrices", row, 16, 16);
  for (int m = 0; m < 4; m++) {
    const u32* from = (const u32*)shuffle((u64)row, 8 * m + (int)(threadIdx.x & 31) / 4, where);
    d[m] = from[threadIdx.x & 3];
  }
}
DEVICE void load_matrices_transposed(u32 (&d)[4], const void* row, WHERE) {
  emulate::check_shared("load_matrices_transposed", row, 16, 16);
  for (int m = 0; m < 4; m++) {
    int first = 8 * m + 2 * (int)(threadIdx.x & 3), column = (int)(threadIdx.x & 31) / 4;
    u32 low = ((const u16*)shuffle((u64)row, first, where))[column];
    d[m] = low | (u32)((const u16*)shuffle((u64)row, first + 1, where))[column] << 16;
  }
}
DEVICE void cluster_arrive_relaxed(WHERE) { cluster_arrive(where); }
template <class T> DEVICE void store_async(T* to, int rank, T value, u64* barrier, WHERE) {
  emulate::check_shared("store_async", to, sizeof(T), sizeof(T));
  emulate::carry_out({cluster_map(to, rank, where), &value, sizeof(T), cluster_map(barrier, rank, where), 0});
}
DEVICE u32 load_byte_l2(const u8* p) { return *p; }
DEVICE u32 f32x2_to_f16x2(float low, float high) {
  _Float16 pair[2] = {(_Float16)low, (_Float16)high};
  u32 bits;
  memcpy(&bits, pair, 4);
  return bits;
}

#else

// Lane l names row l % 8 (16 bytes) of matrix l / 8; d[m] is word l % 4 of row l / 4 of matrix m.
DEVICE void load_matrices(u32 (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}
// The same, d[m] being elements l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
DEVICE void load_matrices_transposed(u32 (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}
// For what was read before: its reads are over once their values are used. Nothing written before becomes visible.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE u32 cluster_address(const void* p, int rank) {
  u32 out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(shared_address(p)), "r"(rank));
  return out;
}
// Stores at `to` in block `rank` of the cluster and then counts the bytes at `barrier` there (places of this block).
DEVICE void store_async(uint4* to, int rank, uint4 value, u64* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
               :
               : "r"(cluster_address(to, rank)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w),
                 "r"(cluster_address(barrier, rank))
               : "memory");
}
DEVICE void store_async(float2* to, int rank, float2 value, u64* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];"
               :
               : "r"(cluster_address(to, rank)), "r"(as_bits(value.x)), "r"(as_bits(value.y)),
                 "r"(cluster_address(barrier, rank))
               : "memory");
}
DEVICE void store_async(float* to, int rank, float value, u64* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               :
               : "r"(cluster_address(to, rank)), "r"(as_bits(value)), "r"(cluster_address(barrier, rank))
               : "memory");
}
DEVICE u32 load_byte_l2(const u8* p) { return __ldcg(p); }
DEVICE u32 f32x2_to_f16x2(float low, float high) {  // nearest even
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

#endif
