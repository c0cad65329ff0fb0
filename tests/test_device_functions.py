"""Every function of common.cuh against a plain computation, on the emulator and, where there is one, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashstep import jit

CPU = torch.device("cpu")
NAN = float("nan")

pytestmark = pytest.mark.usefixtures("own_kernel_cache")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")
    return torch.device(request.param, 0) if request.param == "cuda" else CPU


# Kernels of this file: name -> body of KERNEL(k, K, 1024, 1) and the fields of K. Every one is also compiled for GPUs.
PROGRAMS: dict[str, tuple[str, list[tuple[str, str]]]] = {}


def program(name: str, fields: str, body: str, before: str = "") -> str:
    members = [(field.split()[-1], " ".join(field.split()[:-1])) for field in fields.split(",")]
    text = f"{before}\nKERNEL(k, K, 1024, 1) {{\n  launch_dependents();\n  wait_for_dependencies();\n{body}\n}}\n"
    PROGRAMS[name] = text, members
    return name


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, jit.Source]:
    directory = tmp_path_factory.mktemp("kernels")
    for name, (text, _) in PROGRAMS.items():
        (directory / f"{name}.cu").write_text(text)
    return {n: jit.Source(directory / f"{n}.cu", {"k": jit.Params("K", f)}) for n, (_, f) in PROGRAMS.items()}


@pytest.fixture(scope="module")
def run(sources: dict[str, jit.Source], device: torch.device) -> Any:
    """run(program, grid=, ..., constants={}, **fields): tensors go to the device and come back."""

    def go(name: str, grid: int = 1, block: int = 32, shared: int = 0, cluster: int = 1, **fields: Any) -> None:
        module = sources[name].build(device, **fields.pop("constants", {}))
        here = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in fields.items()}
        module.launch("k", grid=grid, block=block, shared=shared, cluster=cluster, **here)()
        for key, value in fields.items():
            if isinstance(value, torch.Tensor) and here[key] is not value:
                value.copy_(here[key])

    return go


# ---- parameters -----------------------------------------------------------------------------------------------------

LAYOUT = [
    ("a", "u8"),
    ("b", "i64"),
    ("c", "bool"),
    ("d", "u16"),
    ("e", "float"),
    ("f", "float*[3]"),
    ("g", "u8[3]"),
    ("h", "const uint4*"),
    ("i", "int"),
    ("j", "u64"),
    ("k", "bf16[2]"),
    ("out", "i64*"),
]
program(
    "layout",
    ", ".join(f"{kind} {name}" for name, kind in LAYOUT),
    "p.out[0] = sizeof(K);"
    + "".join(f"p.out[{i + 1}] = (const char*)&p.{name} - (const char*)&p;" for i, (name, _) in enumerate(LAYOUT))
    + """
  i64* o = p.out + 32;
  o[0] = p.a; o[1] = p.b; o[2] = p.c; o[3] = p.d; o[4] = (i64)p.e; o[5] = p.f[0] == p.f[1]; o[6] = p.f[2] == nullptr;
  o[7] = p.g[0] + 256 * p.g[1] + 65536 * p.g[2]; o[8] = p.h == nullptr; o[9] = p.i; o[10] = (i64)p.j; o[11] = p.k[1];
""",
)


def test_the_struct_is_laid_out_as_the_compiler_does(run):
    out = torch.full((64,), -1)
    x = torch.zeros(4)
    fields = {"a": 255, "b": -(2**40), "c": True, "d": 65535, "e": 7.5, "f": [None, None], "g": [1, 2, 3]}
    run("layout", **fields, h=x, i=-5, j=2**63, k=[1, 2], out=out)
    params = jit.Params("K", LAYOUT)
    assert out[0] == params.size
    assert out[1 : len(LAYOUT) + 1].tolist() == [field.offset for field in params.fields.values()]
    assert out[32:44].tolist() == [255, -(2**40), 1, 65535, 7, 1, 1, 0x030201, 0, -5, -(2**63), 2]


# ---- threads --------------------------------------------------------------------------------------------------------

program(
    "warp",
    "int* out",
    """
  int t = threadIdx.x, n = blockDim.x, *o = p.out + blockIdx.x * n * 8 + t;
  o[0] = shuffle(t * 3, (t + 5) & 31);
  o[n] = shuffle_xor(t * 3, 6);
  o[2 * n] = shuffle_up(t * 3, 2);
  o[3 * n] = (int)ballot(t % 3 == 0);
  o[4 * n] = warp_sum(t);
  o[5 * n] = (int)(warp_max(t * 0.5f) * 2);
  o[6 * n] = (int)(shuffle((u64)t << 40, 31) >> 40);
  o[7 * n] = lane_id() * 100 + warp_id() + (int)gridDim.x * 10000;
  sync_warp();
""",
)


def test_warp_functions(run):
    n, grid = 96, 3
    out = torch.full((grid, 8, n), -1, dtype=torch.int32)
    run("warp", grid=grid, block=n, out=out)
    t = torch.arange(n)
    warp = t // 32 * 32
    ballots = [sum(1 << lane for lane in range(32) if (w * 32 + lane) % 3 == 0) for w in range(3)]
    want = [
        3 * (warp + (t + 5) % 32),
        3 * (t ^ 6),
        3 * torch.where(t % 32 < 2, t, t - 2),
        torch.tensor(ballots)[t // 32].to(torch.int32),
        torch.tensor([sum(range(w * 32, w * 32 + 32)) for w in range(3)])[t // 32],
        warp + 31,
        warp + 31,
        t % 32 * 100 + t // 32 + grid * 10000,
    ]
    for block in range(grid):
        assert torch.equal(out[block], torch.stack([x.to(torch.int32) for x in want]))


program(
    "barriers",
    "const float* x, float* out",
    """
  float* s = (float*)shared_memory();
  int t = threadIdx.x, n = blockDim.x;
  float v = p.x[blockIdx.x * n + t];
  for (int round = 0; round < 5; round++) {
    s[t] = v;
    sync_block();
    v += s[(t + 33) % n];
    sync_block();
  }
  if (t >= 64) {  // all but two warps, at a barrier of their own
    s[t] = v;
    sync_some(2, n - 64);
    v += s[t == n - 1 ? 64 : t + 1];
  }
  if (t == 5) return;  // sync_block does not wait for threads that have ended
  sync_block();
  p.out[blockIdx.x * n + t] = v;
""",
)


def test_block_barriers(run):
    n = 160
    x, out = torch.randint(-9, 9, (2, n)).float(), torch.full((2, n), NAN)
    run("barriers", grid=2, block=n, shared=4 * n, x=x, out=out)
    v = x
    for _ in range(5):
        v = v + v.roll(-33, 1)
    v = torch.cat([v[:, :64], v[:, 64:] + v[:, 64:].roll(-1, 1)], 1)
    assert out[:, 5].isnan().all()
    keep = torch.arange(n) != 5
    assert torch.equal(out[:, keep], v[:, keep])


program(
    "cluster",
    "const float* x, float* out",
    """
  float* s = (float*)shared_memory();
  int t = threadIdx.x, n = blockDim.x, blocks = BLOCKS;
  s[t] = p.x[blockIdx.x * n + t];
  cluster_sync();
  float sum = 0;
  for (int rank = 0; rank < blocks; rank++) sum += *cluster_map(s + t, rank);
  cluster_arrive();
  p.out[blockIdx.x * n + t] = sum * (cluster_rank() + 1);
  cluster_wait();
""",
)


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_clusters_read_each_others_shared_memory(run, blocks):
    x = torch.randint(-9, 9, (3, blocks, 64)).float()
    out = torch.full_like(x, NAN)
    run("cluster", grid=3 * blocks, block=64, shared=256, cluster=blocks, constants={"BLOCKS": blocks}, x=x, out=out)
    assert torch.equal(out, x.sum(1, keepdim=True) * torch.arange(1, blocks + 1)[:, None])


program(
    "memory",
    "const u32* x, u32* counter, u64* top, u32* out",
    """
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  uint4 a = load_stream(p.x + 4 * i), b = load_volatile((const uint4*)(p.x + 4 * i));
  uint2 c = load_l2((const uint2*)(p.x + 4 * i + 2));
  store_volatile((uint4*)(p.out + 4 * i), make_uint4(a.x + load_l2(p.x + 4 * i), a.y + b.y, a.z + c.x, b.w + c.y));
  max_atomic(p.top, (u64)p.x[4 * i] << 8);
  max_atomic(p.counter + 1, p.x[4 * i]);
  prefetch_l2(p.x, 64);
  fence_device();
  // The last block to arrive reads what all wrote.
  u32* last = (u32*)shared_memory();
  sync_block();
  if (threadIdx.x == 0) *last = add_atomic(p.counter, 1) == gridDim.x - 1;
  sync_block();
  if (*last && threadIdx.x == 0) {
    fence_device();
    u32 sum = 0;
    for (u32 k = 0; k < 4 * gridDim.x * blockDim.x; k++) sum += load_l2(p.out + k);
    store_release(p.counter + 2, sum);
    store_release_system(p.counter + 3, load_acquire(p.counter + 2) + load_acquire_system(p.counter));
  }
""",
)


def test_memory_and_the_last_block(run):
    x = torch.randint(0, 2**20, (4 * 3 * 64,), dtype=torch.int32)
    counter, top = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    out = torch.full_like(x, -1)
    run("memory", grid=3, block=64, shared=16, x=x, counter=counter, top=top, out=out)
    assert torch.equal(out, 2 * x)
    total = int(out.sum())
    assert counter.tolist() == [3, int(x[::4].max()), total, total + 3]
    assert int(top) == int(x[::4].max()) << 8


# ---- copies ---------------------------------------------------------------------------------------------------------

program(
    "pipeline",
    "const float* x, float* out, int steps",
    """
  struct Shared { alignas(128) float data[STAGES][256]; u64 full[STAGES], empty[STAGES]; };
  Shared& s = *(Shared*)shared_memory();
  int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < STAGES; i++) { barrier_init(&s.full[i], 1); barrier_init(&s.empty[i], 256); }
    barrier_init_fence();
  }
  sync_block();
  if (t >= 256) {
    if (t == 256)
      for (int k = 0; k < p.steps; k++) {
        int stage = k % STAGES, round = k / STAGES;
        barrier_wait(&s.empty[stage], (round & 1) ^ 1);
        barrier_expect(&s.full[stage], 1024);
        bulk_copy(s.data[stage], p.x + k * 256, 512, &s.full[stage]);
        bulk_copy(s.data[stage] + 128, p.x + k * 256 + 128, 512, &s.full[stage], evict_first_policy());
      }
    return;
  }
  float sum = 0;
  for (int k = 0; k < p.steps; k++) {
    int stage = k % STAGES, round = k / STAGES;
    barrier_wait(&s.full[stage], round & 1);
    sum = sum * 0.5f + s.data[stage][(t * 7) & 255];
    barrier_arrive(&s.empty[stage]);
  }
  p.out[t] = sum;
""",
)


@pytest.mark.parametrize(("stages", "steps"), [(1, 3), (3, 1), (3, 20), (4, 4)])
def test_mbarrier_pipeline(run, stages, steps):
    x, out = torch.randn(steps, 256), torch.full((256,), NAN)
    run("pipeline", block=288, shared=stages * 1040, constants={"STAGES": stages}, x=x, out=out, steps=steps)
    want = torch.zeros(256)
    for row in x:
        want = want * 0.5 + row[(torch.arange(256) * 7) & 255]
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


program(
    "cp_async",
    "const u32* x, u32* out",
    """
  uint4* s = (uint4*)shared_memory();
  int t = threadIdx.x;
  for (int i = 0; i < 4; i++) {
    cp_async16(s + i * 64 + t, p.x + (i * 64 + t) * 4);
    cp_async_commit();
  }
  cp_async_wait<2>();
  sync_block();
  u32 sum = s[64 - 1 - t].x + s[64 + 63 - t].y;
  cp_async_wait<0>();
  sync_block();
  p.out[t] = sum + s[128 + 63 - t].z + s[192 + 63 - t].w;
""",
)


def test_cp_async(run):
    x, out = torch.randint(0, 2**20, (4, 64, 4), dtype=torch.int32), torch.full((64,), -1, dtype=torch.int32)
    run("cp_async", block=64, shared=4096, x=x, out=out)
    assert torch.equal(out, sum(x[i, :, i] for i in range(4)).flip(0).to(torch.int32))


# ---- products -------------------------------------------------------------------------------------------------------

program(
    "mma",
    "const u32* a, const u32* b, float* d",
    """
  int l = threadIdx.x, r = l >> 2, q = l & 3;  // a: [16][8] pairs along K, b: [8][8] pairs along K, d: [16][8]
  float d[4] = {p.d[r * 8 + 2 * q], p.d[r * 8 + 2 * q + 1], p.d[(r + 8) * 8 + 2 * q], p.d[(r + 8) * 8 + 2 * q + 1]};
  u32 a0 = p.a[r * 8 + q], a1 = p.a[(r + 8) * 8 + q], a2 = p.a[r * 8 + 4 + q], a3 = p.a[(r + 8) * 8 + 4 + q];
  if (BRAIN) mma_bf16(d, a0, a1, a2, a3, p.b[r * 8 + q], p.b[r * 8 + 4 + q]);
  else mma_f16(d, a0, a1, a2, a3, p.b[r * 8 + q], p.b[r * 8 + 4 + q]);
  for (int i = 0; i < 4; i++) p.d[(r + 8 * (i >> 1)) * 8 + 2 * q + (i & 1)] = d[i];
""",
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mma(run, dtype):
    a, b, d = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype), torch.randn(16, 8)
    a[3], b[5] = a[3] * 1e-7, b[5] * 64  # float16: subnormals
    want = d.double() + a.double() @ b.double().T
    size = d.double().abs() + a.double().abs() @ b.double().abs().T
    constants = {"BRAIN": dtype == torch.bfloat16}
    run("mma", block=32, constants=constants, a=a.view(torch.int32), b=b.view(torch.int32), d=d)
    assert ((d.double() - want).abs() <= 2e-6 * size).all()  # tensor cores truncate to 24 bits or so


program(
    "wgmma",
    "const u8* a, const u8* b, float* d",
    """
#ifdef HAS_WGMMA
  // a: units [2 of K][4 warps][32 lanes][16 B]; b: fragments of 8 rows x 64; d: [2][64][8], one product each
  int l = lane_id(), w = warp_id(), r = l >> 2, q = l & 3;
  uint4* s = (uint4*)shared_memory();
  if (threadIdx.x < 32) s[threadIdx.x] = ((const uint4*)p.b)[threadIdx.x];
  fence_async();
  sync_block();
  float d[2][4];
  uint4 a[2];
  for (int k = 0; k < 2; k++) a[k] = ((const uint4*)p.a)[(k * 4 + w) * 32 + l];
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u64 b = wgmma_descriptor(shared_memory() + 256 * k);
    wgmma_e4m3(d[k], a[k].x, a[k].y, a[k].z, a[k].w, b);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < 4; i++) p.d[(k * 64 + w * 16 + r + 8 * (i >> 1)) * 8 + 2 * q + (i & 1)] = d[k][i];
#endif
""",
)


def units(weight: torch.Tensor) -> torch.Tensor:
    """Weights [rows, columns] of one byte as units: [rows / 16][columns / 32][32 lanes][16 bytes] (common.cuh)."""
    w = weight.reshape(
        weight.shape[0] // 16, 2, 8, weight.shape[1] // 32, 2, 4, 4
    )  # rows: half, r; columns: half, q, byte
    return w.permute(0, 3, 2, 5, 4, 1, 6).reshape(weight.shape[0] // 16, weight.shape[1] // 32, 32, 16).contiguous()


def test_wgmma(run, device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("wgmma exists on SM90 only")
    a, b = (torch.randn(n, 64).to(torch.float8_e4m3fn) for n in (64, 8))
    fragments = b.view(torch.uint8).reshape(8, 4, 16).transpose(0, 1).contiguous()
    d = torch.full((2, 64, 8), NAN)
    run("wgmma", block=128, shared=512, a=units(a.view(torch.uint8)).transpose(0, 1).contiguous(), b=fragments, d=d)
    for k in range(2):
        x, y = (t.double()[:, 32 * k : 32 * k + 32] for t in (a, b))
        assert ((d[k].double() - x @ y.T).abs() <= 2**-9 * (x.abs() @ y.abs().T)).all()  # 13 bits per addend


program(
    "wide wgmma",
    "const u8* a, const u8* b, float* d",
    """
#ifdef HAS_WGMMA
  // a: [2 of K][4 warps][32 lanes][16 B]; b: [TILES of 8 rows][2 of K][256 B]; d: [64][8 TILES]
  int l = lane_id(), w = warp_id(), r = l >> 2, q = l & 3;
  for (int i = threadIdx.x; i < TILES * 32; i += 128) ((uint4*)shared_memory())[i] = ((const uint4*)p.b)[i];
  fence_async();
  sync_block();
  float d[4 * TILES];
  uint4 a[2];
  for (int k = 0; k < 2; k++) a[k] = ((const uint4*)p.a)[(k * 4 + w) * 32 + l];
  for (int i = 0; i < 4 * TILES; i++) d[i] = 1.0f;
  u64 b = wgmma_descriptor(shared_memory(), 512);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 2; k++) {
    if constexpr (BRAIN) wgmma_bf16(d, a[k].x, a[k].y, a[k].z, a[k].w, wgmma_further(b, 256 * k));
    else wgmma_e4m3(d, a[1].x, a[1].y, a[1].z, a[1].w, wgmma_further(b, 256));
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int t = 0; t < TILES; t++)
    for (int i = 0; i < 4; i++)
      p.d[(w * 16 + r + 8 * (i >> 1)) * 8 * TILES + 8 * t + 2 * q + (i & 1)] = d[4 * t + i];
#endif
""",
)


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_wide_wgmma(run, device, dtype, tiles):
    """e4m3 overwrites, bf16 adds to what was there and to the product before."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("wgmma exists on SM90 only")
    columns = 32 // dtype.itemsize  # of a product
    a, b = (torch.randn(n, 2 * columns).to(dtype) for n in (64, 8 * tiles))
    # A lane's register: rows r, r + 8 and then the other half of K; columns q of four.
    lanes = a.view(4, 2, 8, 2, 2, 4, 4 // dtype.itemsize).permute(3, 0, 2, 5, 4, 1, 6).contiguous().view(torch.uint8)
    pieces = b.view(tiles, 8, 2, 2, 16 // dtype.itemsize).permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8)
    d = torch.full((64, 8 * tiles), NAN)
    constants = {"TILES": tiles, "BRAIN": dtype == torch.bfloat16}
    run("wide wgmma", block=128, shared=512 * tiles, constants=constants, a=lanes.flatten(), b=pieces.flatten(), d=d)
    x, y = a.double(), b.double()
    if dtype == torch.bfloat16:
        assert ((d.double() - 1 - x @ y.T).abs() <= 2**-20 * (1 + x.abs() @ y.abs().T)).all()
    else:
        x, y = x[:, columns:], y[:, columns:]
        assert ((d.double() - x @ y.T).abs() <= 2**-9 * (x.abs() @ y.abs().T)).all()  # 13 bits per addend


program(
    "cluster stores",
    "float* out",
    """
  // Every thread of both blocks sends four floats to the same place in the other block.
  u64* b = (u64*)shared_memory();
  float4* mail = (float4*)(shared_memory() + 16);
  int t = threadIdx.x, rank = cluster_rank();
  if (t == 0) {
    barrier_init(b, 1);
    barrier_init_fence();
    barrier_expect(b, 20 * 64);
  }
  cluster_sync();
  cluster_store(mail + t, 1 - rank, make_float4(rank, t, rank + t, 1.0f), b);
  cluster_store((float*)(mail + 64) + t, 1 - rank, (float)(100 * rank + t), b);
  barrier_wait(b, 0);
  float4 v = mail[t];
  float* to = p.out + (rank * 64 + t) * 5;
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w, to[4] = ((float*)(mail + 64))[t];
""",
)


def test_cluster_stores(run):
    out = torch.full((2, 64, 5), NAN)
    run("cluster stores", grid=2, block=64, cluster=2, shared=16 + 64 * 20, out=out)
    other, t = torch.tensor([1.0, 0.0]).unsqueeze(1), torch.arange(64.0)
    expected = torch.stack(torch.broadcast_tensors(other, t, other + t, torch.ones(1), 100 * other + t), -1)
    assert torch.equal(out, expected)


# ---- conversions ----------------------------------------------------------------------------------------------------

program(
    "bits",
    "const u32* x, const u32* y, u32* out, int n",
    """
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
    u32 x = p.x[i], y = p.y[i];
    p.out[i] = (u32)count_bits(x);
    p.out[p.n + i] = (u32)leading_zeros(x);
    p.out[2 * p.n + i] = (u32)lowest_bit(x);
    p.out[3 * p.n + i] = multiply_high(x, y);
    p.out[4 * p.n + i] = permute_bytes(x, y, 0x1404);
    p.out[5 * p.n + i] = permute_bytes(x, y, 0xB276);
  }
""",
)


def test_integers(run):
    x = torch.randint(-(2**31), 2**31, (1000,)) >> torch.randint(0, 32, (1000,))
    y = torch.randint(-(2**31), 2**31, (1000,))
    x[0] = 0
    out = torch.full((6, 1000), -1, dtype=torch.int32)
    run("bits", block=64, x=x.to(torch.int32), y=y.to(torch.int32), out=out, n=1000)
    for i, (u, v) in enumerate(zip((x & 0xFFFFFFFF).tolist(), (y & 0xFFFFFFFF).tolist(), strict=True)):
        data = [*u.to_bytes(4, "little"), *v.to_bytes(4, "little")]
        want = [
            u.bit_count(),
            32 - u.bit_length(),
            (u & -u).bit_length() - 1,
            u * v >> 32,
            int.from_bytes([data[4], data[0], data[4], data[1]], "little"),
            int.from_bytes([data[6], data[7], data[2], data[3]], "little"),  # the top bit of a nibble is not looked at
        ]
        assert [value & 0xFFFFFFFF for value in out[:, i].tolist()] == [value & 0xFFFFFFFF for value in want]


program(
    "decode",
    "float* e4m3, float* brain, float* half, float* e2m1, float* ue8m0",
    """
  for (u32 i = threadIdx.x; i < 65536; i += blockDim.x) {
    p.half[i] = as_float(i & 1 ? f16x2_to_f32_high(i << 16) : f16x2_to_f32_low(i));
    if (i >= 256) continue;
    p.e4m3[i] = e4m3_to_f32(i);
    p.brain[i] = bf16x2_high(e4m3x2_to_bf16x2(i << 8 | (i ^ 1)));
    p.brain[256 + i] = bf16x2_low(e4m3x2_to_bf16x2((i ^ 1) << 8 | i));
    p.ue8m0[i] = ue8m0_to_f32(i);
    if (i >= 1 && i <= 252) p.ue8m0[256 + i] = ue8m0_inverse(i);
    if (i < 16) {
      p.e2m1[i] = e2m1_to_f32(i);
      p.e2m1[16 + i] = e4m3_to_f32(e2m1_low_to_e4m3(i)) * 64;
      p.e2m1[32 + i] = e4m3_to_f32(e2m1_high_to_e4m3(i << 12 | 0xF0F) >> 8) * 64;
    }
  }
""",
)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, any NaN for a NaN."""
    both_nan = got.isnan() & want.isnan()
    return bool(((got.view(torch.int32) == want.view(torch.int32)) | both_nan).all())


def test_decoding(run):
    e4m3, brain, half, e2m1, ue8m0 = (torch.full((n,), NAN) for n in (256, 512, 65536, 48, 512))
    run("decode", block=128, e4m3=e4m3, brain=brain, half=half, e2m1=e2m1, ue8m0=ue8m0)
    codes = torch.arange(256).to(torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float()
    assert same(e4m3, want)
    number = ~want.isnan()
    assert same(brain[:256][number], want[number])
    assert same(brain[256:][number], want[number])
    assert same(half, torch.arange(65536).to(torch.uint16).view(torch.float16).float())
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert same(e2m1, torch.cat([magnitudes, -magnitudes]).repeat(3))
    scales = codes.view(torch.float8_e8m0fnu).float()
    assert same(ue8m0[:255], scales[:255])
    assert same(ue8m0[257:509], 1 / scales[1:253])


program(
    "encode",
    "const float* x, u32* brain, u32* e4m3, u32* e2m1, u32* codes, int n",
    """
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
    float x = p.x[i], y = p.x[p.n - 1 - i];
    p.brain[i] = f32_to_bf16(x);
    p.brain[p.n + i] = f32x2_to_bf16x2(x, y);
    p.e4m3[i] = f32x2_to_e4m3x2(x, y);
    p.e2m1[i] = f32_to_e2m1(x);
    p.codes[i] = fp8_scale_code(fabsf(x)) | fp4_scale_code(fabsf(x)) << 8;
  }
""",
)


def test_encoding(run):
    exponents = torch.arange(256, dtype=torch.int64)[:255, None] << 23
    # All that a tie or its neighbours can be: leading mantissa bits, then nothing, a tie, or just beside one.
    tops = torch.arange(256, dtype=torch.int64)[None] << 15
    tails = torch.tensor([0, 1, 0x3FFF, 0x4000, 0x7FFF])
    bits = (exponents[..., None] | tops[..., None] | tails).flatten()
    bits = torch.cat([bits, bits | 1 << 31, torch.tensor([0x7F800000, 0xFF800000, 0x7FC00000])])
    x = bits.to(torch.int32).view(torch.float32)[torch.randperm(len(bits))[: 2**17]].contiguous()
    n = len(x)
    brain = torch.full((2 * n,), -1, dtype=torch.int32)
    e4m3, e2m1, codes = (torch.full((n,), -1, dtype=torch.int32) for _ in range(3))
    run("encode", block=128, x=x, brain=brain, e4m3=e4m3, e2m1=e2m1, codes=codes, n=n)
    want = x.bfloat16()
    assert same((brain[:n] << 16).view(torch.float32), want.float())
    assert same((brain[n:] << 16).view(torch.float32), want.float())
    assert same((brain[n:] & -65536).view(torch.float32), want.flip(0).float())
    eights = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert same((e4m3 & 255).to(torch.uint8).view(torch.float8_e4m3fn).float(), eights)
    assert same((e4m3 >> 8).to(torch.uint8).view(torch.float8_e4m3fn).float(), eights.flip(0))
    number = ~x.isnan()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (x[number].double().abs()[:, None] - grid).abs()
    even_first = distance + torch.tensor([0, 1e-9] * 4) * (distance < 8)  # a tie goes to the even code
    assert torch.equal((e2m1[number] & 7).long(), even_first.clamp(max=1e38).argmin(1).where(x[number].abs() < 6, 7))
    assert torch.equal((e2m1[number] >> 3).bool(), x[number].signbit())
    usable = x.abs() < 2.0**100
    amax = x[usable].double().abs()
    for code, least, largest in ((codes[usable] & 255, 1e-4, 448), (codes[usable] >> 8, 6 * 2.0**-126, 6)):
        ratio = (amax.clamp(min=torch.tensor(least).double()).float() * torch.tensor(1 / largest)).double()
        assert torch.equal(code.long() - 127, torch.ceil(torch.log2(ratio)).long())


program(
    "bf16_product",
    "const u32* x, const u32* y, u32* out, int n",
    """
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) p.out[i] = multiply_bf16x2(p.x[i], p.y[i]);
""",
)


def test_bf16_products(run):
    x, y = (torch.randint(0, 65536, (50000, 2)).to(torch.uint16).view(torch.bfloat16) for _ in range(2))
    x[:25000] *= 2.0**-60  # subnormal results
    y[:25000] *= 2.0**-60
    out = torch.zeros(50000, dtype=torch.int32)
    run(
        "bf16_product",
        block=128,
        x=x.view(torch.int32)[:, 0].contiguous(),
        y=y.view(torch.int32)[:, 0].contiguous(),
        out=out,
        n=50000,
    )
    got = out.view(torch.bfloat16).reshape(-1, 2)
    exact = x.double() * y.double()
    # Nearest of the two neighbours, ties to the even one, decided in double.
    spacing = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))) - 7)
    rounded = torch.round(exact / spacing) * spacing
    want = rounded.where(rounded.abs() < 2.0**128, torch.copysign(torch.tensor(torch.inf).double(), rounded))
    want = want.where(exact.isfinite(), exact)
    assert same(got.float().contiguous(), want.float().contiguous())


program(
    "functions",
    "const float* x, float* out, u32* codes, int n",
    """
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
    float x = p.x[i], s, c;
    sincos_accurate(x, &s, &c);
    p.out[i] = s;
    p.out[p.n + i] = c;
    p.out[2 * p.n + i] = exp_accurate(x * 1e-4f);
    p.out[3 * p.n + i] = log_accurate(fabsf(x));
    p.out[4 * p.n + i] = exp_fast(x * 1e-5f);
    p.out[5 * p.n + i] = rsqrtf(fabsf(x)) + fminf(x, 1.0f) + min(i, 3) + max(2u, (u32)i) + fmaf(x, x, 1.0f);
    p.out[6 * p.n + i] = round_bf16(x);
    p.out[7 * p.n + i] = sqrt_fast(fabsf(x));
    p.out[8 * p.n + i] = divide_fast(x, (float)(i + 3));
    p.codes[i] = fragment_offset(i % 24, i * 3 % 128, 8);
  }
  if (threadIdx.x < 256)
    for (int i = 0; i < 256; i++) p.out[9 * p.n + threadIdx.x * 256 + i] = ue8m0_product(threadIdx.x, i);
""",
)


def test_functions(run):
    x = torch.cat([torch.randn(500) * 1e5, torch.arange(100, dtype=torch.float32) * 8192])
    x[500] = 1
    n = len(x)
    out, codes = torch.full((9 * n + 65536,), NAN), torch.full((n,), -1, dtype=torch.int32)
    run("functions", block=256, x=x, out=out, codes=codes, n=n)
    rows = out[: 9 * n].reshape(9, n).double()
    d, i = x.double(), torch.arange(n)
    assert (rows[0] - d.sin()).abs().max() < 2e-7
    assert (rows[1] - d.cos()).abs().max() < 2e-7
    torch.testing.assert_close(rows[2], (x * torch.tensor(1e-4)).double().exp(), rtol=3e-7, atol=0)
    torch.testing.assert_close(rows[3], d.abs().log(), rtol=3e-7, atol=2e-7)
    torch.testing.assert_close(rows[4], (x * torch.tensor(1e-5)).double().exp(), rtol=3e-6, atol=0)
    mixed = d.abs().rsqrt() + d.clamp(max=1) + i.clamp(max=3) + i.clamp(min=2) + d * d + 1
    torch.testing.assert_close(rows[5], mixed, rtol=1e-6, atol=1e-3)
    assert torch.equal(rows[6].float(), x.bfloat16().float())
    torch.testing.assert_close(rows[7], d.abs().sqrt(), rtol=5e-7, atol=0)
    torch.testing.assert_close(rows[8], d / (i + 3), rtol=5e-7, atol=0)
    row, k = i % 24, i * 3 % 128
    assert torch.equal(codes.long(), ((row // 8 * 8 + k // 16) * 8 + row % 8) * 16 + k % 16)
    e = torch.arange(256)[:, None] + torch.arange(256) - 254
    want = torch.exp2(e.double()).where(e >= -149, torch.tensor(0.0).double())
    want = want.where(e < 128, torch.tensor(torch.inf).double()).float()
    assert same(out[9 * n :].reshape(256, 256).contiguous(), want)


@pytest.mark.parametrize("architecture", jit.ARCHITECTURES)
def test_the_kernels_of_this_file_compile_for_gpus(sources, architecture):
    constants = {"BLOCKS": 2, "STAGES": 3, "BRAIN": True, "TILES": 6}
    for source in sources.values():
        assert jit.compile_for(source, architecture, **constants).resources("k").spilled == 0
