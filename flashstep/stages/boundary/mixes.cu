// The mixes of many rows on every multiprocessor (mixes.cuh): slices x groups of rows.
// Few rows need no kernel of their own; their slices run on spare blocks of the sublayer's first kernel.
#include "boundary/mixes.cuh"

KERNEL(mixes, MixesOfRows, 256, 2) {
  launch_dependents();
  Mixes m = {p.stream, p.fn, p.partials, p.slices, p.rows};
  int slice = (int)blockIdx.x % p.slices, first = (int)blockIdx.x / p.slices * p.rows_per_block;
  int end = min(first + p.rows_per_block, p.rows), turn = 0;
  mixes_slice(m, slice, (float*)shared_memory(), first, end, turn, [] { wait_for_dependencies(); });
}
