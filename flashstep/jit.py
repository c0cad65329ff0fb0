"""CUDA text and constants become a binary and launches.

Owns: the generated text around a kernel source (constants, parameter structs), the compilers (NVRTC for a GPU, g++ and
`stages/emulate.h` for the CPU), the binary cache on disk, packing of parameters, and the launch itself. Knows no stage.

A binary's cache key holds the text of every file included, the constants, the options, the architecture and the
compiler's version; entries are directories renamed into place and carry a digest, so that a damaged one is made anew.
A change of the sources leaves the old entries behind: those that were used longest ago go when the cache outgrows
CACHE_BYTES.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import math
import numbers
import operator
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGE = Path(__file__).parent
STAGES = PACKAGE / "stages"
MAX_SHARED = 227 * 1024  # bytes of shared memory a block may have on SM90, SM100 and SM103
MAX_CLUSTER = 16
CACHE_BYTES = 1 << 29  # that the cache may take; the kernels of one model and one version take less than a tenth
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")

Constant = bool | int | float


class CompileError(RuntimeError):
    """A kernel source does not compile; the message is the compiler's, with file and line of the tree."""


class KernelError(RuntimeError):
    """An emulated kernel did something wrong (deadlock, out of range); the message says which thread, where."""


def emulated(device: torch.device) -> bool:
    """Whether kernels of `device` run on the emulator instead of a GPU."""
    return device.type == "cpu"


# ---- parameters -----------------------------------------------------------------------------------------------------

_SCALARS = {  # C type -> struct code
    "int": "i",
    "i32": "i",
    "u32": "I",
    "float": "f",
    "i64": "q",
    "u64": "Q",
    "u8": "B",
    "u16": "H",
    "bf16": "H",
    "bool": "?",
}
_BYTES = {"uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"}
_WORDS = {"int32", "uint32"}
_LONGS = {"int64", "uint64"}
_DTYPES: dict[str, set[str]] = {  # pointed-to C type -> names of torch dtypes
    "bf16": {"bfloat16", "int16", "uint16"},
    "u16": {"int16", "uint16", "bfloat16", "float16"},
    "u8": _BYTES,
    "int": _WORDS,
    "i32": _WORDS,
    "u32": _WORDS,
    "float": {"float32"},
    "i64": _LONGS,
    "u64": _LONGS,
    "bool": {"bool", "uint8"},
}
_VECTORS = {"uint2": 8, "int2": 8, "float2": 8, "uint4": 16, "int4": 16, "float4": 16}  # any dtype, aligned
_TYPE = re.compile(r"(const )?(\w+)(\*)?(?:\[(\d+)\])?")
_RESERVED = ("name", "grid", "block", "shared", "cluster", "together", "stage", "nbytes")


@dataclass(frozen=True)
class Mapped:
    """A tensor in ordinary host memory, for a pointer: the caller knows that the device reads it there."""

    tensor: Tensor


@dataclass(frozen=True)
class Field:
    """One member of a parameter struct: C type, place, and how many (0: not an array)."""

    name: str
    const: bool
    base: str
    pointer: bool
    count: int
    offset: int

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return 8 if self.pointer else struct.calcsize(_SCALARS[self.base])

    @property
    def declaration(self) -> str:
        """The member as C++."""
        array = f"[{self.count}]" if self.count else ""
        return f"{'const ' if self.const else ''}{self.base}{'*' if self.pointer else ''} {self.name}{array};"


class Params:
    """The parameter struct of a kernel: its C++ name and (name, type) of the members, in order.

    Types: int, i32, u32, float, i64, u64, u8, u16, bf16, bool; pointers "float*", "const u8*", "const void*"; arrays
    of either, "float*[8]". Laid out by the rules of C. ValueError for a type that is none of these.
    """

    def __init__(self, name: str, fields: Sequence[tuple[str, str]]) -> None:
        if not fields:
            raise ValueError(f"{name}: a kernel needs at least one parameter")
        self.name = name
        self.fields: dict[str, Field] = {}
        offset = alignment = 0
        for field, kind in fields:
            match = _TYPE.fullmatch(kind)
            if match is None or not (match[3] or match[2] in _SCALARS):
                raise ValueError(f"{name}.{field}: {kind!r} is no parameter type")
            if not field.isidentifier() or field in _RESERVED or field in self.fields:
                raise ValueError(f"{name}.{field}: the name is taken or not an identifier")
            made = Field(field, bool(match[1]), match[2], bool(match[3]), int(match[4] or 0), 0)
            size = made.element_size
            offset = -(-offset // size) * size
            self.fields[field] = Field(field, made.const, made.base, made.pointer, made.count, offset)
            offset += size * max(made.count, 1)
            alignment = max(alignment, size)
        self.size = -(-offset // alignment) * alignment

    @property
    def declaration(self) -> str:
        """The struct as C++."""
        return f"struct {self.name} {{ {' '.join(f.declaration for f in self.fields.values())} }};"

    def pack(self, values: Mapping[str, Any], device: torch.device) -> ctypes.Array[ctypes.c_uint64]:
        """The struct's bytes. Tensors must outlive their use.

        TypeError: a member is missing or unknown, or has the wrong type or dtype. ValueError: not contiguous,
        on another device, misaligned, or out of the type's range.
        """
        missing, unknown = self.fields.keys() - values.keys(), values.keys() - self.fields.keys()
        if missing or unknown:
            parts = [f"missing {sorted(missing)}"] if missing else []
            parts += [f"unknown {sorted(unknown)}"] if unknown else []
            raise TypeError(f"{self.name}: {', '.join(parts)}")
        buffer = (ctypes.c_uint64 * (-(-self.size // 8)))()
        for field in self.fields.values():
            value = values[field.name]
            if field.count == 0:
                self._put(buffer, field, field.offset, value, field.name, device)
                continue
            if isinstance(value, str | Tensor) or not isinstance(value, Sequence):
                raise TypeError(f"{self.name}.{field.name}: takes a list of {field.count}, not {type(value).__name__}")
            if len(value) > field.count or (not field.pointer and len(value) != field.count):
                raise ValueError(f"{self.name}.{field.name}: {len(value)} values for {field.count} places")
            for i, item in enumerate(value):
                where = f"{field.name}[{i}]"
                self._put(buffer, field, field.offset + i * field.element_size, item, where, device)
        return buffer

    def _put(
        self,
        buffer: ctypes.Array[ctypes.c_uint64],
        field: Field,
        offset: int,
        value: Any,
        where: str,
        device: torch.device,
    ) -> None:
        where = f"{self.name}.{where}"
        if field.pointer:
            struct.pack_into("Q", buffer, offset, _address(field, value, where, device))
            return
        try:
            if field.base == "bool":
                if not isinstance(value, bool):
                    raise TypeError
            elif field.base == "float":
                if not isinstance(value, numbers.Real):
                    raise TypeError
                value = float(value)
            else:
                value = operator.index(value)
            struct.pack_into(_SCALARS[field.base], buffer, offset, value)
        except (struct.error, OverflowError):
            raise ValueError(f"{where}: {value!r} does not fit {field.base}") from None
        except TypeError:
            raise TypeError(f"{where}: {field.base} expected, not {type(value).__name__}") from None


def _address(field: Field, value: Any, where: str, device: torch.device) -> int:
    if value is None:
        return 0
    mapped = isinstance(value, Mapped)
    value = value.tensor if mapped else value
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: a tensor or None expected, not {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    if field.base in _DTYPES and dtype not in _DTYPES[field.base]:
        raise TypeError(f"{where}: {field.base}* expected, the tensor is {dtype}")
    if not value.is_contiguous():
        raise ValueError(
            f"{where}: the tensor is not contiguous (shape {tuple(value.shape)}, strides {value.stride()})"
        )
    # Elements of an array may lie on peers; pinned host memory is addressable by the GPU.
    fits = value.device.type == device.type and (bool(field.count) or value.device.index in (None, device.index))
    if not fits and not (device.type == "cuda" and value.device.type == "cpu" and (mapped or value.is_pinned())):
        raise ValueError(f"{where}: the tensor is on {value.device}, the kernel on {device}")
    address = value.data_ptr()
    if address % _VECTORS.get(field.base, 1):
        raise ValueError(f"{where}: {field.base}* must be aligned to {_VECTORS[field.base]} bytes")
    return address


# ---- sources --------------------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def _literal(name: str, value: Constant) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"constant {name!r} is not an identifier")
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        wide = not -(2**31) < value < 2**31
        return f"constexpr {'long long' if wide else 'int'} {name} = {value}{'ll' if wide else ''};"
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"constant {name} = {value!r}: bool, int or finite float")
    return f"constexpr float {name} = {value.hex()}f;"


def _files(path: Path) -> list[Path]:
    """`path`, common.cuh and all that they include by quotes, each once, in order of first mention."""
    found: list[Path] = []

    def visit(file: Path) -> None:
        if file in found:
            return
        found.append(file)
        for name in _INCLUDE.findall(file.read_text()):
            for place in (file.parent / name, STAGES / name):
                if place.is_file():
                    visit(place.resolve())
                    break

    for start in (STAGES / "common.cuh", path):
        visit(start.resolve())
    return found


class Source:
    """A .cu file and the parameter structs of its kernels.

    `path` is relative to the package ("stages/attention/attend.cu") or absolute. `hot` names kernels that must not
    spill registers at the released shapes.
    """

    def __init__(self, path: str | Path, kernels: Mapping[str, Params], hot: Sequence[str] = ()) -> None:
        self.path = PACKAGE / path
        self.kernels = dict(kernels)
        self.hot = tuple(hot)
        structs: dict[str, str] = {}
        for params in self.kernels.values():
            if structs.setdefault(params.name, params.declaration) != params.declaration:
                raise ValueError(f"{path}: two different structs are called {params.name}")
        if unknown := set(hot) - self.kernels.keys():
            raise ValueError(f"{path}: no kernel {sorted(unknown)}")

    def text(self, constants: Mapping[str, Constant]) -> str:
        """The translation unit: common.cuh, the constants, the parameter structs, the source."""
        structs = dict.fromkeys(params.declaration for params in self.kernels.values())
        literals = [_literal(name, value) for name, value in sorted(constants.items())]
        lines = ['#include "common.cuh"', *literals, *structs, f'#include "{self.path}"']
        return "\n".join(lines) + "\n"

    def build(self, device: torch.device, **constants: Constant) -> Module:
        """Compile, or take from the cache, for `device`; CompileError if the source is wrong."""
        if emulated(device):
            return _emulated_module(self, constants, device)
        return _gpu_module(self, constants, device)


# ---- cache ----------------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Where binaries are kept: $XDG_CACHE_HOME/flashstep/kernels, ~/.cache if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashstep" / "kernels"


def _key(source: Source, constants: Mapping[str, Constant], options: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (source.text(constants), *options):
        digest.update(part.encode() + b"\0")
    for file in _files(source.path):
        digest.update(str(file).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _cached(key: str) -> tuple[Path, dict[str, Any]] | None:
    """The binary's path and notes of an intact entry."""
    entry = cache_directory() / key[:32]
    try:
        notes: dict[str, Any] = json.loads((entry / "notes.json").read_text())
        if notes["key"] == key and notes["digest"] == hashlib.sha256((entry / "binary").read_bytes()).hexdigest():
            os.utime(entry / "notes.json")  # says when it was last used
            return entry / "binary", notes
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _store(key: str, binary: bytes, notes: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    root = cache_directory()
    root.mkdir(parents=True, exist_ok=True)
    notes = {**notes, "key": key, "digest": hashlib.sha256(binary).hexdigest()}
    private = Path(tempfile.mkdtemp(dir=root, prefix="making-"))
    (private / "binary").write_bytes(binary)
    (private / "notes.json").write_text(json.dumps(notes))
    entry = root / key[:32]
    for _ in range(2):
        try:
            private.rename(entry)
            _trim(root, keep=entry)
            return entry / "binary", notes
        except OSError:
            if intact := _cached(key):  # another process was faster
                shutil.rmtree(private)
                return intact
            shutil.rmtree(entry, ignore_errors=True)  # damaged
    return private / "binary", notes


def cache_bytes() -> int:
    """Bytes of all binaries in the cache."""
    return sum(nbytes for _, nbytes, _ in _entries(cache_directory()))


def _entries(root: Path) -> list[tuple[float, int, Path]]:
    """When each entry was last used, its bytes, and where it is; also of what a process that died left half made."""
    found = []
    for entry in root.iterdir() if root.is_dir() else ():
        try:
            notes = entry / "notes.json"
            used = (notes if notes.exists() else entry).stat().st_mtime
            found.append((used, sum(file.stat().st_size for file in entry.iterdir()), entry))
        except OSError:  # another process has just removed it
            continue
    return found


def _trim(root: Path, keep: Path) -> None:
    """Remove the entries that were used longest ago until the rest fits; never `keep`."""
    entries = sorted(_entries(root))
    excess = sum(nbytes for _, nbytes, _ in entries) - CACHE_BYTES
    for _, nbytes, entry in entries:
        if excess <= 0:
            return
        if entry != keep:
            shutil.rmtree(entry, ignore_errors=True)
            excess -= nbytes


# ---- emulator -------------------------------------------------------------------------------------------------------

_GXX_OPTIONS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",  # kernels reinterpret memory freely, as nvcc lets them
    "-fvisibility=hidden",
    "-fPIC",
    "-w",
    "-fsanitize=null,alignment,bounds,shift-exponent",  # handled in emulate.h: no run-time library
    "-DFLASHSTEP_EMULATE",
)


@functools.cache
def _gxx() -> tuple[str, str]:
    """Path of g++, and what identifies its output: version and this CPU's features (-march=native)."""
    path = shutil.which("g++")
    if path is None:
        raise RuntimeError("running kernels without a GPU needs g++: install it, or use the reference")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = Path("/proc/cpuinfo")
    features = re.search(r"^(flags|Features)\s*:.*$", cpu.read_text(), re.MULTILINE) if cpu.exists() else None
    return path, version + (features[0] if features else "")


_loaded: dict[str, Any] = {}
_loading = threading.Lock()


def _emulated_module(source: Source, constants: Mapping[str, Constant], device: torch.device) -> Module:
    compiler, identity = _gxx()
    key = _key(source, constants, (*_GXX_OPTIONS, identity))
    with _loading:
        if key not in _loaded:
            path, _ = _cached(key) or _store(key, _compile_gxx(compiler, source, constants), {})
            _loaded[key] = (ctypes.CDLL(str(path)), threading.Lock())
        library, lock = _loaded[key]
    functions = {}
    for name in source.kernels:
        function = getattr(library, f"flashstep_launch_{name}", None)
        if function is None:
            raise CompileError(f"{source.path}: there is no kernel {name} in it")
        function.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4]
        function.restype = ctypes.c_char_p
        functions[name] = function
    return EmulatedModule(source, device, functions, lock)


def _compile_gxx(compiler: str, source: Source, constants: Mapping[str, Constant]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        main, object_file, binary = (Path(directory) / name for name in ("constants.cpp", "object.o", "binary"))
        main.write_text(source.text(constants))
        for command in (
            [compiler, *_GXX_OPTIONS, f"-I{STAGES}", "-c", str(main), "-o", str(object_file)],
            [compiler, "-shared", str(object_file), "-o", str(binary)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CompileError(f"{source.path} does not compile with g++:\n{done.stderr}")
        return binary.read_bytes()


# ---- GPU ------------------------------------------------------------------------------------------------------------

_NVRTC_OPTIONS = (
    "--std=c++17",
    "-default-device",
    "-lineinfo",
    "--ptxas-options=-v",
    "--diag-suppress=177",  # constants that a source does not use
    "--no-cache",  # from its own cache NVRTC gives a binary without the report
)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Resources:
    """What a thread of a kernel takes: registers, bytes of stack, bytes spilled from registers (stores and loads)."""

    registers: int
    stack: int
    spilled: int


@dataclass(frozen=True)
class Binary:
    """A cubin, and what the compiler reported of its kernels."""

    code: bytes
    reported: dict[str, Resources]

    def resources(self, kernel: str) -> Resources:
        """What `kernel` takes. LookupError where the compiler did not say."""
        if kernel not in self.reported:
            raise LookupError(f"the compiler reported no resources of {kernel}, but of {sorted(self.reported)}")
        return self.reported[kernel]


def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as e:
        raise RuntimeError("kernels for a GPU need the packages cuda-bindings and nvidia-cuda-nvrtc, version 13") from e


def compile_for(source: Source, architecture: str, **constants: Constant) -> Binary:
    """Compile for one of ARCHITECTURES, or take from the cache; needs no GPU. CompileError if the source is wrong."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture}: one of {', '.join(ARCHITECTURES)}")
    nvrtc = _nvrtc()
    error, major, minor = nvrtc.nvrtcVersion()
    if error:
        raise RuntimeError(f"NVRTC does not answer: {error.name}")
    options = (f"--gpu-architecture={architecture}", *_NVRTC_OPTIONS)
    key = _key(source, constants, (*options, f"NVRTC {major}.{minor}"))
    entry = _cached(key)
    if entry is None:
        code, log = _compile_nvrtc(nvrtc, source, constants, options)
        entry = _store(key, code, {"resources": {name: vars(r) for name, r in _resources(log).items()}})
    path, notes = entry
    return Binary(path.read_bytes(), {name: Resources(**values) for name, values in notes["resources"].items()})


def _compile_nvrtc(
    nvrtc: Any, source: Source, constants: Mapping[str, Constant], options: Sequence[str]
) -> tuple[bytes, str]:
    error, program = nvrtc.nvrtcCreateProgram(source.text(constants).encode(), b"constants.cu", 0, [], [])
    if error:
        raise RuntimeError(f"NVRTC: {error.name}")
    try:
        arguments = [option.encode() for option in (*options, f"-I{STAGES}")]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.decode(errors="replace").rstrip("\0\n ")
        if error:
            raise CompileError(f"{source.path} does not compile with NVRTC ({options[0]}):\n{text}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _resources(log: str) -> dict[str, Resources]:
    """What ptxas reports (-v) of each kernel."""
    found = {}
    name, stack, spilled = "", 0, 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif spills := _SPILLS.search(line):
            stack, spilled = int(spills[1]), int(spills[2]) + int(spills[3])
        elif (registers := _REGISTERS.search(line)) and name:
            found[name] = Resources(int(registers[1]), stack, spilled)
    return found


def _architecture(device: torch.device) -> str:
    name = "sm_{}{}a".format(*torch.cuda.get_device_capability(device))
    if name not in ARCHITECTURES:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} is {name}; kernels exist for {', '.join(ARCHITECTURES)}"
        )
    return name


def _check(driver: Any, result: tuple[Any, ...], what: str) -> Any:
    if result[0]:
        _, text = driver.cuGetErrorString(result[0])
        raise RuntimeError(f"{what}: {result[0].name} ({text.decode() if text else 'unknown error'})")
    return result[1] if len(result) > 1 else None


def _gpu_module(source: Source, constants: Mapping[str, Constant], device: torch.device) -> Module:
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    binary = compile_for(source, _architecture(device), **constants)
    driver = importlib.import_module("cuda.bindings.driver")
    loaded = f"{device} {hashlib.sha256(binary.code).hexdigest()}"
    with _loading, torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the device's context current
        context = _check(driver, driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
        if loaded not in _loaded:
            _loaded[loaded] = _check(driver, driver.cuModuleLoadData(binary.code), f"loading {source.path.name}")
        functions = {}
        attributes = driver.CUfunction_attribute
        for name in source.kernels:
            found = driver.cuModuleGetFunction(_loaded[loaded], name.encode())
            function = _check(driver, found, f"{source.path}: kernel {name}")
            for attribute, value in (
                (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, MAX_SHARED),
                (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
            ):
                _check(driver, driver.cuFuncSetAttribute(function, attribute, value), f"{source.path.name}: {name}")
            functions[name] = function
    return GpuModule(source, device, functions, driver, context)


# ---- launches -------------------------------------------------------------------------------------------------------


class Module:
    """The compiled kernels of a source, on one device."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source = source
        self.device = device

    def launch(
        self,
        kernel: str,
        *,
        grid: int,
        block: int,
        shared: int = 0,
        cluster: int = 1,
        together: bool = False,
        stage: str = "",
        nbytes: int = 0,
        **fields: Any,
    ) -> Launch:
        """Prepare a launch; nothing runs yet.

        grid: blocks. block: threads of a block. shared: bytes of dynamic shared memory. cluster: blocks of a cluster.
        together: blocks wait for each other, so all of them have to be resident at the same time: at most one for each
        multiprocessor. stage: for accounts of time. nbytes: weight bytes the launch reads. fields: the members of the
        kernel's struct.
        KeyError: no such kernel. TypeError, ValueError: as `Params.pack`, or a shape that the hardware refuses.
        """
        if kernel not in self.source.kernels:
            raise KeyError(f"{self.source.path.name} has no kernel {kernel!r}, but {sorted(self.source.kernels)}")
        for wrong, what in (
            (grid < 1, f"a grid of {grid} blocks"),
            (block < 32 or block > 1024 or block % 32, f"{block} threads in a block: whole warps, 32..1024"),
            (not 1 <= cluster <= MAX_CLUSTER, f"a cluster of {cluster} blocks: 1..{MAX_CLUSTER}"),
            (grid % max(cluster, 1), f"a grid of {grid} blocks is not a multiple of the cluster of {cluster}"),
            (
                together and grid > self.most_together,
                f"{grid} blocks that wait for each other: at most {self.most_together}",
            ),
            (together and cluster > 1, "blocks that wait for each other are in no clusters"),
            (not 0 <= shared <= MAX_SHARED, f"{shared} bytes of shared memory: at most {MAX_SHARED}"),
        ):
            if wrong:
                raise ValueError(f"{kernel}: {what}")
        return Launch(self, kernel, Shape(grid, block, shared, cluster, together), stage, nbytes, fields)

    @property
    def most_together(self) -> int:
        """Blocks that may wait for each other."""
        raise NotImplementedError

    def prepare(self, kernel: str, shape: Shape, parameters: ctypes.Array[ctypes.c_uint64]) -> Any:
        """What `run` needs, made once."""
        raise NotImplementedError

    def run(self, prepared: Any, stream: int | None, pdl: bool) -> None:
        """Run a prepared launch."""
        raise NotImplementedError


@dataclass(frozen=True)
class Shape:
    """Extent of a launch: blocks, threads of a block, bytes of shared memory, blocks of a cluster; do blocks wait?"""

    grid: int
    block: int
    shared: int
    cluster: int
    together: bool = False


class Launch:
    """A kernel with its parameters packed and its shape fixed; call it to run it. Keeps its tensors alive."""

    __slots__ = ("_prepared", "_run", "fields", "module", "name", "nbytes", "shape", "stage")

    def __init__(
        self, module: Module, name: str, shape: Shape, stage: str, nbytes: int, fields: Mapping[str, Any]
    ) -> None:
        self.module, self.name, self.stage, self.nbytes = module, name, stage, nbytes
        self.shape = shape
        self.fields = dict(fields)
        parameters = module.source.kernels[name].pack(fields, module.device)
        self._prepared = module.prepare(name, shape, parameters)
        self._run = module.run

    def __call__(self, stream: int | None = None, pdl: bool = True) -> None:
        """Run on `stream` (a CUDA stream handle; None: torch's current one).

        pdl: may start before the kernel before it in the stream has ended (the kernel itself then waits).
        """
        self._run(self._prepared, stream, pdl)

    def replace(self, **fields: Any) -> Launch:
        """The same launch with some parameters changed."""
        return Launch(self.module, self.name, self.shape, self.stage, self.nbytes, {**self.fields, **fields})

    @property
    def grid(self) -> int:
        """Blocks."""
        return self.shape.grid

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.shape.block

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self.shape.shared

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.shape.cluster

    def __repr__(self) -> str:
        return f"Launch({self.name}, {self.shape})"


class EmulatedModule(Module):
    """Kernels on the CPU, thread by thread."""

    def __init__(
        self, source: Source, device: torch.device, functions: Mapping[str, Any], lock: threading.Lock
    ) -> None:
        super().__init__(source, device)
        self._functions = functions
        self._lock = lock  # the library's emulator runs one launch at a time

    def prepare(self, kernel: str, shape: Shape, parameters: ctypes.Array[ctypes.c_uint64]) -> Any:
        """The library's function and its arguments."""
        # The emulator runs the blocks of a cluster at the same time, and clusters one after the other.
        cluster = shape.grid if shape.together else shape.cluster
        return self._functions[kernel], (parameters, shape.grid, shape.block, shape.shared, cluster)

    @property
    def most_together(self) -> int:
        """What the emulator runs at the same time."""
        return MAX_CLUSTER

    def run(self, prepared: Any, stream: int | None, pdl: bool) -> None:
        """Run to the end; KernelError if the kernel did something wrong."""
        function, arguments = prepared
        with self._lock:
            message = function(*arguments)
        if message is not None:
            raise KernelError(message.decode())


@dataclass(frozen=True)
class PreparedLaunch:
    """What cuLaunchKernelEx takes: function, addresses of the arguments, and a configuration for pdl false and true."""

    name: str
    function: Any
    arguments: int
    configurations: tuple[Any, Any]
    memory: tuple[Any, ...]  # that `arguments` points to


class GpuModule(Module):
    """Kernels on a GPU."""

    def __init__(
        self,
        source: Source,
        device: torch.device,
        functions: Mapping[str, Any],
        driver: Any,
        context: Any,
    ) -> None:
        super().__init__(source, device)
        self._context = context
        self._functions = functions
        self._driver = driver

    @property
    def most_together(self) -> int:
        """One block for each multiprocessor."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def prepare(self, kernel: str, shape: Shape, parameters: ctypes.Array[ctypes.c_uint64]) -> PreparedLaunch:
        """The arguments and both configurations."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        plain, overlapped = (launch_configuration(self._driver, shape, pdl) for pdl in (False, True))
        arguments = ctypes.addressof(pointers)
        return PreparedLaunch(kernel, self._functions[kernel], arguments, (plain, overlapped), (pointers, parameters))

    def run(self, prepared: PreparedLaunch, stream: int | None, pdl: bool) -> None:
        """Put the launch on the stream; RuntimeError if the driver refuses."""
        configuration = prepared.configurations[pdl]
        if stream is None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        configuration.hStream = stream
        driver = self._driver
        result = driver.cuLaunchKernelEx(configuration, prepared.function, prepared.arguments, 0)
        errors = driver.CUresult
        if result[0] in (errors.CUDA_ERROR_INVALID_CONTEXT, errors.CUDA_ERROR_INVALID_HANDLE):
            # This thread has not used the device yet, or uses another one.
            _check(driver, driver.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
            result = driver.cuLaunchKernelEx(configuration, prepared.function, prepared.arguments, 0)
            _check(driver, driver.cuCtxPopCurrent(), "cuCtxPopCurrent")
        if result[0]:
            _check(driver, result, f"launch of {prepared.name}")


def launch_configuration(driver: Any, shape: Shape, pdl: bool) -> Any:
    """A CUlaunchConfig of the shape; `pdl` allows the overlap with the kernel before it."""
    configuration = driver.CUlaunchConfig()
    configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = shape.grid, 1, 1
    configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = shape.block, 1, 1
    configuration.sharedMemBytes = shape.shared
    ids = driver.CUlaunchAttributeID
    attributes = []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if shape.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = shape.cluster
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    configuration.attrs = attributes
    configuration.numAttrs = len(attributes)
    return configuration
