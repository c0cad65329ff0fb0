"""Parameters, compilers, cache and launches of kernels, and the mistakes that the emulator finds."""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flashstep import jit

CPU = torch.device("cpu")
NAN = float("nan")


pytestmark = pytest.mark.usefixtures("own_kernel_cache")


def source_of(
    directory: Path, body: str, fields: list[tuple[str, str]] | None = None, name: str = "k.cu"
) -> jit.Source:
    (directory / name).write_text(f"KERNEL(k, K, 128, 1) {{\n{body}\n}}\n")
    return jit.Source(directory / name, {"k": jit.Params("K", fields or [("out", "float*")])})


# ---- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n": ...}, TypeError, "missing.*'n'"),
        ({"other": 1}, TypeError, "unknown.*'other'"),
        ({"n": 1.5}, TypeError, "K.n: int expected"),
        ({"n": 2**31}, ValueError, "K.n: 2147483648 does not fit"),
        ({"flag": 1}, TypeError, "K.flag: bool expected"),
        ({"scale": "1"}, TypeError, r"K.scale: float expected"),
        ({"x": torch.zeros(4)}, TypeError, r"K.x: bf16\* expected, the tensor is float32"),
        ({"x": 17}, TypeError, "K.x: a tensor or None expected"),
        ({"x": torch.zeros(4, 4, dtype=torch.bfloat16).T}, ValueError, "K.x: .*not contiguous"),
        ({"x": torch.zeros(4, dtype=torch.bfloat16, device="meta")}, ValueError, "K.x: the tensor is on meta"),
        ({"v": torch.zeros(8)[1:5]}, ValueError, "K.v: .*aligned to 16"),
        ({"outs": torch.zeros(2)}, TypeError, "K.outs: takes a list of 2"),
        ({"outs": [None] * 3}, ValueError, "K.outs: 3 values for 2 places"),
        ({"outs": [None, torch.zeros(1, dtype=torch.int32)]}, TypeError, r"K.outs\[1\]: float\* expected"),
    ],
)
def test_wrong_parameters(change, error, message):
    kinds = ["x const bf16*", "n int", "flag bool", "scale float", "v float4*", "outs float*[2]"]
    params = jit.Params("K", [tuple(kind.split(" ", 1)) for kind in kinds])
    right: dict[str, Any] = {"x": None, "n": 1, "flag": False, "scale": 1, "v": torch.zeros(4), "outs": [None]}
    params.pack(right, CPU)
    with pytest.raises(error, match=message):
        params.pack({k: v for k, v in (right | change).items() if v is not ...}, CPU)


@pytest.mark.parametrize(
    ("pointer", "dtype"),
    [
        ("bf16*", torch.int16),
        ("u8*", torch.float8_e4m3fn),
        ("const u8*", torch.float8_e8m0fnu),
        ("u32*", torch.int32),
        ("i64*", torch.int64),
        ("void*", torch.float64),
        ("const uint4*", torch.uint8),
    ],
)
def test_dtypes_that_fit(pointer, dtype):
    x = torch.empty(16, dtype=dtype)
    packed = jit.Params("K", [("x", pointer)]).pack({"x": x}, CPU)
    assert packed[0] == x.data_ptr()


@pytest.mark.parametrize(
    "fields", [[], [("x", "double")], [("x", "float**")], [("x", "int"), ("x", "int")], [("grid", "int")]]
)
def test_wrong_structs(fields):
    with pytest.raises(ValueError, match="K"):
        jit.Params("K", fields)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"grid": 0, "block": 32}, "grid of 0"),
        ({"grid": 1, "block": 48}, "48 threads"),
        ({"grid": 1, "block": 2048}, "2048 threads"),
        ({"grid": 6, "block": 32, "cluster": 4}, "not a multiple of the cluster"),
        ({"grid": 32, "block": 32, "cluster": 32}, "cluster of 32"),
        ({"grid": 1, "block": 32, "shared": 228 * 1024}, "shared memory"),
    ],
)
def test_wrong_shapes(tmp_path, shape, message):
    module = source_of(tmp_path, "wait_for_dependencies();").build(CPU)
    with pytest.raises(ValueError, match=message):
        module.launch("k", **shape, out=None)
    with pytest.raises(KeyError, match="no kernel 'q'"):
        module.launch("q", grid=1, block=32)


def test_launch_says_what_it_is_and_can_be_changed(tmp_path):
    source = source_of(tmp_path, "wait_for_dependencies(); p.out[0] = p.n;", [("out", "float*"), ("n", "int")])
    out = torch.zeros(1)
    launch = source.build(CPU).launch("k", grid=4, block=64, cluster=2, shared=64, stage="s", nbytes=9, out=out, n=3)
    assert out[0] == 0, "nothing runs before the call"
    launch()
    assert out[0] == 3
    other = launch.replace(n=5)
    other()
    assert out[0] == 5
    for x in (launch, other):
        assert (x.name, x.stage, x.nbytes, x.grid, x.block, x.shared, x.cluster) == ("k", "s", 9, 4, 64, 64, 2)
    with pytest.raises(TypeError, match="unknown"):
        launch.replace(m=1)


def test_constants_reach_the_source(tmp_path):
    body = "wait_for_dependencies(); p.out[0] = A + (FLAG ? 0.5f : 0); p.out[1] = X; p.out[2] = BIG == 1ll << 40;"
    source = source_of(tmp_path, body)
    out = torch.zeros(3)
    source.build(CPU, A=-3, FLAG=True, X=0.1, BIG=2**40).launch("k", grid=1, block=32, out=out)()
    assert out.tolist() == [-2.5, torch.tensor(0.1).item(), 1]
    for name, value in (("x y", 1), ("X", NAN), ("X", "1")):
        with pytest.raises(ValueError, match=re.escape(name)):
            source.text({name: value})


def test_a_launch_configuration_carries_cluster_and_overlap():
    driver = pytest.importorskip("cuda.bindings.driver")
    ids = driver.CUlaunchAttributeID
    for cluster in (1, 8):
        for pdl in (False, True):
            made = jit.launch_configuration(driver, jit.Shape(64, 256, 1000, cluster), pdl)
            assert (made.gridDimX, made.blockDimX, made.sharedMemBytes, made.gridDimY) == (64, 256, 1000, 1)
            found = {attribute.id: attribute.value for attribute in made.attrs} if made.numAttrs else {}
            assert (ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION in found) == pdl
            assert (ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION in found) == (cluster > 1)
            if cluster > 1:
                assert found[ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim.x == cluster


# ---- compilers and cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["g++", "NVRTC"])
def test_compile_errors_name_the_line_of_the_tree(tmp_path, compiler):
    source = source_of(tmp_path, "wait_for_dependencies();\nint a = mistake;")
    with pytest.raises(jit.CompileError, match=rf"(?s){compiler}.*k\.cu[:(]3.*mistake"):
        source.build(CPU) if compiler == "g++" else jit.compile_for(source, "sm_90a")


def test_unknown_kernels_and_architectures(tmp_path):
    source = source_of(tmp_path, "wait_for_dependencies();")
    with pytest.raises(jit.CompileError, match="no kernel other"):
        jit.Source(source.path, {"other": source.kernels["k"]}).build(CPU)
    with pytest.raises(ValueError, match="sm_80"):
        jit.compile_for(source, "sm_80")
    with pytest.raises(ValueError, match="no kernel"):
        jit.Source(source.path, source.kernels, hot=["q"])
    with pytest.raises(ValueError, match="two different structs"):
        jit.Source(source.path, {"a": jit.Params("K", [("x", "int")]), "b": jit.Params("K", [("y", "int")])})


@pytest.fixture
def compilations(tmp_path, monkeypatch) -> list[str]:
    """An empty cache, and the compilations from now on."""
    made: list[str] = []

    def counted(name: str) -> None:
        original = getattr(jit, name)

        def call(*arguments: Any) -> Any:
            made.append(name)
            return original(*arguments)

        monkeypatch.setattr(jit, name, call)

    counted("_compile_gxx")
    counted("_compile_nvrtc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_loaded", {})
    return made


@pytest.mark.parametrize("target", ["emulator", "sm_90a"])
def test_cache(tmp_path, compilations, monkeypatch, target):
    (tmp_path / "part.cuh").write_text("constexpr float PART = 1;")
    source = source_of(tmp_path, '#include "part.cuh"\nwait_for_dependencies(); p.out[0] = PART + A;')

    def make(**constants: int) -> int:
        """Compilations that it takes a new process to build."""
        monkeypatch.setattr(jit, "_loaded", {})
        before = len(compilations)
        if target == "emulator":
            out = torch.zeros(1)
            source.build(CPU, **constants).launch("k", grid=1, block=32, out=out)()
            part = float(re.search(r"= (\d)", (tmp_path / "part.cuh").read_text())[1])
            assert out[0] == part + constants["A"]
        else:
            assert jit.compile_for(source, target, **constants).resources("k").registers > 0
        return len(compilations) - before

    assert make(A=1) == 1
    assert make(A=1) == 0
    assert make(A=2) == 1, "a constant is part of the key"
    (tmp_path / "part.cuh").write_text("constexpr float PART = 2;")
    assert make(A=1) == 1, "so is an included file"
    assert make(A=1) == 0
    entries = list(jit.cache_directory().iterdir())
    assert len(entries) == 3
    for damage in (b"", b"damaged"):
        for entry in entries:
            (entry / "binary").unlink()  # not written over: this process has it mapped
            (entry / "binary").write_bytes(damage)
        assert make(A=1) == 1
        assert make(A=1) == 0
        for entry in entries:
            (entry / "notes.json").write_bytes(damage)
        assert make(A=1) == 1
    for entry in entries:
        (entry / "notes.json").unlink(missing_ok=True)
    assert make(A=1) == 1
    assert not list(jit.cache_directory().glob("making-*"))


def test_cache_filled_by_several_at_once(tmp_path, compilations):
    source = source_of(tmp_path, "wait_for_dependencies();")
    threads = [threading.Thread(target=jit.compile_for, args=(source, "sm_90a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (entry,) = jit.cache_directory().iterdir()
    assert json.loads((entry / "notes.json").read_text())["resources"]["k"]["spilled"] == 0


def test_a_cache_that_grows_too_large_forgets_what_was_used_longest_ago(tmp_path, compilations, monkeypatch):
    source = source_of(tmp_path, "wait_for_dependencies(); p.out[0] = A;")

    def make(a: int) -> int:
        before = len(compilations)
        jit.compile_for(source, "sm_90a", A=a)
        return len(compilations) - before

    monkeypatch.setattr(jit, "CACHE_BYTES", 1)
    assert make(0) == 1
    assert make(0) == 0, "what was just made stays, whatever its size"
    entry_bytes = jit.cache_bytes()
    monkeypatch.setattr(jit, "CACHE_BYTES", 3 * entry_bytes + entry_bytes // 2)
    (tmp_path / "cache" / "flashstep" / "kernels" / "making-died").mkdir()
    for a in (1, 2):
        assert make(a) == 1
    times = {entry: i for i, entry in enumerate(sorted(jit.cache_directory().iterdir()))}
    for entry, i in times.items():  # all of them long ago
        os.utime(entry / "notes.json" if (entry / "notes.json").exists() else entry, (1000 + i, 1000 + i))
    assert make(0) == 0
    assert make(1) == 0
    assert make(3) == 1
    assert jit.cache_bytes() <= jit.CACHE_BYTES
    assert [make(a) for a in (0, 1, 3)] == [0, 0, 0]
    assert make(2) == 1, "the one that was not used"


def test_spills_are_seen(tmp_path):
    body = """
  wait_for_dependencies();
  float a[300];
#pragma unroll
  for (int i = 0; i < 300; i++) a[i] = p.out[i];
  sync_block();
#pragma unroll
  for (int i = 0; i < 300; i++) p.out[i] = a[(i * 7) % 300] + a[299 - i];
"""
    resources = jit.compile_for(source_of(tmp_path, body), "sm_90a").resources("k")
    assert resources.registers > 200
    assert resources.spilled > 0


def test_a_kernel_that_the_compiler_says_nothing_about_is_named():
    binary = jit.Binary(b"", {"other": jit.Resources(1, 0, 0)})
    with pytest.raises(LookupError, match=r"no resources of k, but of \['other'\]"):
        binary.resources("k")


def test_the_emulator_has_every_function_of_the_gpu():
    text = (jit.STAGES / "common.cuh").read_text()
    gpu = set(
        re.findall(
            r"^(?:template.*> )?DEVICE [\w *]+?(\w+)\(", text.split("#else")[1].split("// FLASHSTEP_EMULATE")[0], re.M
        )
    )
    emulator = set(
        re.findall(r"^(?:template.*> )?DEVICE [\w *]+?(\w+)\(", (jit.STAGES / "emulate.h").read_text(), re.M)
    )
    assert len(gpu) > 60
    assert gpu - emulator == set()


# ---- what the emulator finds ----------------------------------------------------------------------------------------

MISTAKES = {  # BAR is at shared + 8, TO at shared + 16
    "half a warp": (
        "if (threadIdx.x < 16) sync_warp();",
        r"deadlock.*16 threads \(first: 0\) in warp function sync_warp.*112 threads.*finished",
    ),
    "different warp functions": (
        "if (threadIdx.x & 1) sync_warp(); else ballot(true);",
        r"k\.cu:2: is in \w+, while other lanes",
    ),
    "mbarrier nobody completes": (
        "if (!threadIdx.x) { barrier_init(BAR, 2); barrier_arrive(BAR); } sync_block(); barrier_wait(BAR, 0);",
        r"128 threads \(first: 0\) at barrier_wait\(shared \+ 8, parity 0\): phase 0, 1 of 2 arrivals and 0 bytes "
        r"to come \(.*k\.cu:2\)",
    ),
    "bytes nobody brings": (
        "if (!threadIdx.x) { barrier_init(BAR, 1); barrier_expect(BAR, 64); } sync_block(); barrier_wait(BAR, 0);",
        "0 of 1 arrivals and 64 bytes to come",
    ),
    "named barrier": (
        "if (threadIdx.x < 64) sync_some(1, 96);",
        r"deadlock.*64 threads \(first: 0\) at sync_some\(1, 96\)",
    ),
    "named barrier, disagreement": (
        "sync_some(1, threadIdx.x < 64 ? 64 : 96);",
        r"sync_some\(1, (64|96)\), while others",
    ),
    "no barrier_init": (
        "barrier_arrive((u64*)shared_memory());",
        r"barrier_arrive: no barrier_init was done at shared \+ 0",
    ),
    "too many arrivals": (
        "if (!threadIdx.x) { barrier_init(BAR, 1); barrier_expect(BAR, 16); barrier_arrive(BAR); }",
        "more arrivals in a phase",
    ),
    "polling for ever": ("while (load_acquire((u32*)p.out) != 1) relax();", "deadlock, threads only poll.*128 threads"),
    "cluster": (
        "if (blockIdx.x % 2) cluster_sync(); else sync_some(1, 160);",
        r"block 1: 128 threads \(first: 0\) at cluster_wait",
    ),
    "cluster rank": ("cluster_map(shared_memory(), 2);", "cluster_map: rank 2 of 2"),
    "cluster arrival left open": ("cluster_arrive();", "ended between cluster_arrive and cluster_wait"),
    "bulk copy, address": (
        "barrier_init(BAR, 1); bulk_copy(TO, p.out + 1, 16, BAR);",
        "bulk_copy: address 0x.* is not a multiple of 16",
    ),
    "bulk copy, shared address": (
        "barrier_init(BAR, 1); bulk_copy(TO + 8, p.out, 16, BAR);",
        r"bulk_copy: shared \+ 24 is not a multiple of 16",
    ),
    "bulk copy, size": (
        "barrier_init(BAR, 1); bulk_copy(TO, p.out, 20, BAR);",
        "bulk_copy: 20 bytes",
    ),
    "bulk copy, range": (
        "barrier_init(BAR, 1); bulk_copy(TO, p.out, 256, BAR);",
        r"bytes 16\.\.272 are outside the block's 256 bytes",
    ),
    "bulk copies in flight": (
        "if (!threadIdx.x) { barrier_init(BAR, 1); for (int i = 0; i < 9; i++) bulk_copy(TO, p.out, 16, BAR); }",
        "ended with bulk copies in flight",
    ),
    "cp.async in flight": (
        "cp_async16(shared_memory(), p.out); cp_async_commit();",
        "cp_async copies that nothing waited for",
    ),
    "wgmma in flight": (
        "float d[4]; wgmma_begin(); wgmma_e4m3(d, 0, 0, 0, 0, wgmma_descriptor(shared_memory())); wgmma_commit();",
        "wgmma products that nothing waited for",
    ),
    "wgmma without begin": ("float d[4]; wgmma_e4m3(d, 0, 0, 0, 0, 0);", "outside wgmma_begin"),
    "write behind shared memory": ("shared_memory()[256] = 1;", r"something was written at shared \+ 256"),
    "write far behind": ("shared_memory()[100000] = 1;", "invalid access"),
    "write before": ("shared_memory()[-1] = 1;", "invalid access"),
    "null pointer": ("*(int*)(p.out - p.out) = 1;", "k.cu:2: access through a null pointer"),
    "misaligned vector": ("*(uint4*)(p.out + 1) = make_uint4(1, 2, 3, 4);", "k.cu:2: misaligned address"),
    "register array": (
        "volatile float a[4] = {}; p.out[0] = a[threadIdx.x];",
        r"k\.cu:2: index out of range: \d+, type 'float \[4\]'",
    ),
    "shift": ("p.out[0] = 1u << (threadIdx.x + 31);", r"k\.cu:2: shift by \d+"),
    "load_l2": ("load_l2((const uint4*)p.out + 0); load_stream(p.out + 1);", "load_stream: address"),
    "stack": (
        "volatile char a[70000]; for (int i = 0; i < 70000; i += 64) a[i] = 1;",
        "stack of .* overflowed|invalid access",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_and_survived(tmp_path, mistake):
    body, message = MISTAKES[mistake]
    out = torch.zeros(128)
    body = body.replace("BAR", "((u64*)shared_memory() + 1)").replace("TO", "(shared_memory() + 16)")
    launch = (
        source_of(tmp_path, f"{body} wait_for_dependencies();")
        .build(CPU)
        .launch("k", grid=2, block=128, shared=256, cluster=2, out=out)
    )
    for _ in range(2):
        with pytest.raises(jit.KernelError, match=f"(?s)kernel k.*{message}"):
            launch()
    source_of(tmp_path, "wait_for_dependencies(); p.out[threadIdx.x] = 3;", name="right.cu").build(CPU).launch(
        "k", grid=1, block=128, out=out
    )()
    assert (out == 3).all()


def test_a_block_that_does_not_wait_for_earlier_kernels(tmp_path):
    launch = (
        source_of(tmp_path, "if (blockIdx.x == 0) wait_for_dependencies();")
        .build(CPU)
        .launch("k", grid=2, block=32, out=None)
    )
    with pytest.raises(jit.KernelError, match=r"block 1.*wait_for_dependencies"):
        launch()


def test_more_threads_than_the_launch_bound(tmp_path):
    launch = source_of(tmp_path, "wait_for_dependencies();").build(CPU).launch("k", grid=1, block=256, out=None)
    with pytest.raises(jit.KernelError, match="launch bound is 128"):
        launch()


@pytest.mark.parametrize(
    "body",
    [
        "p.out[threadIdx.x] = ((float*)shared_memory())[threadIdx.x];",  # never written
        "cp_async16(shared_memory() + threadIdx.x * 16, p.out); cp_async_commit();"
        "p.out[threadIdx.x] = *(float*)(shared_memory() + threadIdx.x * 16); cp_async_wait<0>();",  # read too early
        "float d[4]; wgmma_begin(); wgmma_e4m3(d, 0, 0, 0, 0, wgmma_descriptor(shared_memory())); wgmma_commit();"
        "p.out[threadIdx.x] = d[0]; wgmma_wait<0>();",
    ],
)
def test_values_that_are_not_there_yet_are_nan(tmp_path, body):
    out = torch.zeros(128)
    source_of(tmp_path, f"wait_for_dependencies(); {body}").build(CPU).launch(
        "k", grid=1, block=128, shared=2048, out=out
    )()
    assert out.isnan().all()


def test_a_missing_barrier_shows_in_one_of_two_launches(tmp_path):
    """Warps run in rising and in falling order by turns, so a race has a wrong result in one of them."""
    body = "float* s = (float*)shared_memory(); int t = threadIdx.x; wait_for_dependencies();"
    body += "s[t] = 1; p.out[t] = s[t ^ 32];"
    launch = source_of(tmp_path, body).build(CPU).launch("k", grid=1, block=64, shared=256, out=torch.zeros(64))
    for _ in range(2):
        launch()
        assert launch.fields["out"].isnan().any()


def test_launches_from_several_threads(tmp_path):
    body = (
        "wait_for_dependencies(); for (int i = 0; i < 50; i++) { sync_block(); p.out[threadIdx.x] += warp_sum(1.0f); }"
    )
    module = source_of(tmp_path, body).build(CPU)
    outs = [torch.zeros(64) for _ in range(4)]
    launches = [module.launch("k", grid=1, block=64, out=out) for out in outs]
    threads = [threading.Thread(target=launch) for launch in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((out == 1600).all() for out in outs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
def test_launches_in_a_graph(tmp_path):
    body = "launch_dependents(); wait_for_dependencies(); p.out[threadIdx.x] = load_l2(p.out + threadIdx.x) * 2 + 1;"
    device = torch.device("cuda", 0)
    out = torch.zeros(128, device=device)
    launch = source_of(tmp_path, body).build(device).launch("k", grid=1, block=128, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(10):
            launch(pdl=i % 2 == 0)
    assert (out == 0).all()
    graph.replay()
    assert (out == 1023).all()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    launch(stream=stream.cuda_stream)
    stream.synchronize()
    assert (out == 2047).all()
    thread = threading.Thread(target=launch)  # in a thread that has not used the device yet
    thread.start()
    thread.join()
    assert (out == 4095).all()


def test_packed_parameters_are_aligned():
    packed = jit.Params("K", [("x", "i64"), ("y", "u8")]).pack({"x": 1, "y": 2}, CPU)
    assert ctypes.sizeof(packed) == 16
    assert ctypes.addressof(packed) % 8 == 0
