"""The boundary's kernels against the reference, stage by stage.

Each stage of the fused kernel is compared with the exact value of the reference on that kernel's own bf16 input, so
that a bound is what the stage itself may err by: half a unit in the last place of bf16, plus float32 arithmetic.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor

from flashstep import jit
from flashstep.config import ModelConfig
from flashstep.formats import Numerics, fp8_quantize, ue8m0_encode
from flashstep.ops import inverse_rms, rms_norm
from flashstep.stages.boundary import cuda, reference
from flashstep.stages.engram import reference as engram
from flashstep.tiny import small_config

torch.set_num_threads(1)

FLOAT32 = 2.0**-20  # relative error allowed to sums of float32 products, on top of half a bf16 unit
HALF_UNIT = 2.0**-8  # of bf16, relative: at most
NUM = Numerics()


def config_of(hidden: int) -> ModelConfig:
    return ModelConfig.from_dict(small_config(hidden_size=hidden))


def random(*shape: int, scale: float = 1.0, seed: str = "") -> Tensor:
    draws = torch.Generator().manual_seed(zlib.crc32(f"{seed} {shape}".encode()))
    return torch.randn(*shape, generator=draws) * scale


def from_fragments(x: Tensor, rows: int) -> Tensor:
    """[Rt, pieces, 8, width] -> [rows, pieces * width]."""
    return x.transpose(1, 2).flatten(0, 1).flatten(1)[:rows]


def spread(codes: Tensor, rows: int) -> Tensor:
    """Scales [Rt, groups, 8] -> [rows, groups]."""
    return codes.transpose(1, 2).flatten(0, 1)[:rows]


def assert_rounds(got: Tensor, exact: Tensor, magnitude: Tensor, what: str, nearest: float = 0.995) -> None:
    """`got` bf16 is `exact` float64 rounded, but for float32 arithmetic on terms of `magnitude`."""
    error = (got.double() - exact).abs()
    allowed = exact.abs() * HALF_UNIT + magnitude * FLOAT32 + 1e-38
    bad = ~(error <= allowed)
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{what}{list(where)}: {float(got[where])}, exact {float(exact[where])}; {int(bad.sum())} bad"
        )
    equal = (got == exact.to(torch.bfloat16)).double().mean()
    assert equal > nearest, f"{what}: only {float(equal):.4f} are the nearest bf16"


@dataclass
class Case:
    """Random inputs of a boundary, and poisoned outputs."""

    config: ModelConfig
    rows: int
    world: int
    mailbox: Tensor
    stream: Tensor
    weights: reference.Weights
    partials: Tensor
    row_slot: Tensor
    collapsed: cuda.Collapsed
    taps: cuda.Taps
    inject: cuda.Inject

    @classmethod
    def make(
        cls, device: torch.device, hidden: int, rows: int, world: int, slices: int = 5, scale: float = 1.0
    ) -> Case:
        config = config_of(hidden)
        hc, seed = config.hc_mult, f"{hidden} {rows} {world}"
        stream = random(rows, hc, hidden, scale=scale, seed=seed + "x").bfloat16()
        weights = reference.Weights(
            random(24, hc * hidden, scale=2 / (hc * hidden) ** 0.5, seed=seed).float(),
            random(24, seed=seed + "base").float(),
            torch.tensor([0.9, 1.1, 1.7]),
        )
        flat = stream.flatten(1).double()
        columns = torch.linspace(0, hc * hidden, slices + 1).long()
        partials = torch.full((rows, slices, cuda.MIX_RECORD), float("nan"))
        for i in range(slices):
            part = slice(int(columns[i]), int(columns[i + 1]))
            partials[:, i, :24] = (flat[:, part] @ weights.fn[:, part].double().T).float()
            partials[:, i, 24] = flat[:, part].square().sum(1).float()
        tiles, begin, end = -(-rows // 8), 32, 2 * hidden
        poison8 = lambda *shape: torch.full(shape, 0x7F, dtype=torch.uint8, device=device)  # noqa: E731
        poison16 = lambda *shape: torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)  # noqa: E731
        column = min(1, len(config.dspark_target_layer_ids) - 1) * hidden
        return cls(
            config,
            rows,
            world,
            random(world, rows, hidden, seed=seed + "y").to(device),
            stream.to(device),
            weights,
            partials.to(device),
            torch.arange(rows, dtype=torch.int32, device=device),
            cuda.Collapsed(
                (1 + random(hidden, scale=0.3, seed=seed)).bfloat16().to(device),
                poison8(tiles, hidden // 16, 8, 16),
                poison8(tiles, hidden // 32, 8),
                poison16(tiles, hidden // 8, 8, 8),
                poison16(rows, hidden),
            ),
            cuda.Taps(
                poison16(rows, hidden * len(config.dspark_target_layer_ids)),
                column,
                poison8(tiles, (end - begin) // 16, 8, 16),
                poison8(tiles, (end - begin) // 32, 8),
                begin,
                end,
            ),
            cuda.Inject(
                random(world, rows, (hc + 1) * hidden, seed=seed + "kv").to(device),
                (1 + random(hc, hidden, scale=0.3, seed=seed + "q")).bfloat16().to(device),
                (1 + random(hc, hidden, scale=0.3, seed=seed + "k")).bfloat16().to(device),
            ),
        )

    def mixing(self) -> cuda.Mixing:
        device = self.partials.device
        return cuda.Mixing(self.partials, self.weights.base.to(device), self.weights.scale.to(device))

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post, comb in float64, on the CPU."""
        w = self.weights
        return reference.mixes(self.stream.cpu(), replace_double(w), self.config)

    def run(self, **changes: object) -> Tensor:
        """Run the boundary with everything wanted; the stream that comes out."""
        out = torch.full_like(self.stream, float("nan"))
        arguments: dict[str, object] = {
            "mailbox": self.mailbox,
            "mixing": self.mixing(),
            "stream_in": self.stream,
            "stream_out": out,
            "row_slot": self.row_slot,
            "inject": None,
            "taps": self.taps,
            "collapsed": self.collapsed,
        }
        for launch in cuda.boundary(self.stream.device, self.config, **(arguments | changes)):  # type: ignore[arg-type]
            launch()
        return out.cpu()

    def sum(self, slabs: Tensor) -> Tensor:
        """Over ranks in float32, in order, rounded to bf16."""
        total = slabs[0].cpu().clone()
        for slab in slabs[1:].cpu():
            total += slab
        return total.bfloat16()


def replace_double(w: reference.Weights) -> reference.Weights:
    return reference.Weights(w.fn.double(), w.base.double(), w.scale.double())


def check_behind(case: Case, stream: Tensor, pre: Tensor) -> None:
    """Collapse, norm, quantization and taps, of the bf16 `stream` that the kernel wrote."""
    rows, config, c, t = case.rows, case.config, case.collapsed, case.taps
    assert c.hidden is not None
    assert c.bf16 is not None
    hidden = c.hidden.cpu()
    terms = pre.unsqueeze(-1) * stream.double()
    assert_rounds(hidden, terms.sum(1), terms.abs().sum(1), "hidden")
    normed = from_fragments(c.bf16.cpu(), rows)
    weight = c.norm_weight.cpu()
    exact = weight.double() * hidden.double() * inverse_rms(hidden.double(), config.rms_norm_eps)
    assert_rounds(normed, exact, exact.abs(), "normed")
    check_fp8(c.codes, c.scales, normed, "x")
    if t.values is None:
        return
    values = t.values.cpu()
    own = values[:, t.column : t.column + config.hidden_size]
    assert_rounds(own, stream.double().mean(1), stream.double().abs().mean(1), "taps")
    written = torch.zeros(values.shape[1], dtype=torch.bool)
    written[t.column : t.column + config.hidden_size] = True
    assert bool(values[:, ~written].isnan().all()), "the taps of other layers are written"
    first, last = max(t.begin, t.column), min(t.end, t.column + config.hidden_size)
    check_fp8(t.codes, t.scales, values[:, first:last], "taps", first - t.begin)


def check_fp8(codes: Tensor | None, scales: Tensor | None, values: Tensor, what: str, first: int = 0) -> None:
    """Codes and scales of columns `first`.. equal those of the bf16 `values`; nothing else is written."""
    assert codes is not None
    assert scales is not None
    rows, columns = values.shape
    want_codes, want_scales = fp8_quantize(values)
    everything, all_scales = from_fragments(codes.cpu(), codes.shape[0] * 8), spread(scales.cpu(), scales.shape[0] * 8)
    got = everything[:rows, first : first + columns]
    assert torch.equal(got, want_codes.view(torch.uint8)), f"{what}: codes differ"
    got_scales = all_scales[:rows, first // 32 : (first + columns) // 32]
    assert torch.equal(got_scales, ue8m0_encode(want_scales)), f"{what}: scales differ"
    everything, all_scales = everything.clone(), all_scales.clone()
    everything[:rows, first : first + columns] = 0x7F
    all_scales[:rows, first // 32 : (first + columns) // 32] = 0x7F
    assert bool((everything == 0x7F).all()), f"{what}: codes outside the rows or columns are written"
    assert bool((all_scales == 0x7F).all()), f"{what}: scales outside the rows or columns are written"


def check_expand(case: Case, stream: Tensor) -> Tensor:
    """The stream of a boundary without Engram; returns the reference's pre."""
    pre, post, comb = case.coefficients()
    y, old = case.sum(case.mailbox).double(), case.stream.cpu().double()
    exact = post.unsqueeze(-1) * y.unsqueeze(1) + comb.mT @ old
    magnitude = post.unsqueeze(-1) * y.abs().unsqueeze(1) + comb.mT @ old.abs()
    # Mixes come from float32 sums over all columns: their error moves every coefficient a little.
    assert_rounds(stream, exact, magnitude * 4, "stream")
    return pre


# -- mixes ------------------------------------------------------------------------------------------------------------

HOST = """
#include "boundary/mixes.cuh"
KERNEL(host, Host, 512, 1) {
  launch_dependents();
  Mixes m = {p.stream, p.fn, p.partials, p.slices, p.rows};
  mixes_block(m, (int)blockIdx.x, (int)gridDim.x, shared_memory() + 256);
}
"""


def mixes_inputs(
    device: torch.device, hidden: int, rows: int, slices: int
) -> tuple[ModelConfig, Tensor, Tensor, Tensor]:
    config = config_of(hidden)
    stream = random(rows, 4, hidden, seed="stream").bfloat16().to(device)
    fn = random(24, 4 * hidden, scale=0.1, seed="fn").to(device)
    return config, stream, fn, torch.full((rows, slices, cuda.MIX_RECORD), float("nan"), device=device)


def check_partials(partials: Tensor, stream: Tensor, fn: Tensor, hidden: int) -> float:
    """Products and squares slice by slice; returns the worst error in units of what is allowed.

    Products are exact and tensor cores cut off what does not fit: a few units in the last place of the partial sums.
    """
    slices, chunks, worst = partials.shape[1], 4 * hidden // 64, 0.0
    x, w, got = stream.flatten(1).double().cpu(), fn.double().cpu(), partials.double().cpu()
    for i in range(slices):
        part = slice(i * chunks // slices * 64, (i + 1) * chunks // slices * 64)
        exact, magnitude = x[:, part] @ w[:, part].T, x[:, part].abs() @ w[:, part].abs().T
        squares = x[:, part].square().sum(1)
        for values, wanted, size, what in (
            (got[:, i, :24], exact, magnitude, "products"),
            (got[:, i, 24], squares, squares, "squares"),
        ):
            error = float(((values - wanted).abs() / (size * 2.0**-21)).max())
            assert error <= 1, f"{what} of slice {i}: {error} of what is allowed"
            worst = max(worst, error)
    assert bool(got[:, :, 25:].isnan().all()), "what is unused is written"
    return worst


@pytest.mark.parametrize(
    ("hidden", "rows", "slices"), [(128, 1, 4), (128, 6, 1), (128, 9, 3), (128, 48, 4), (5120, 2, 160), (5120, 7, 40)]
)
def test_mixes_of_many_rows(device: torch.device, hidden: int, rows: int, slices: int) -> None:
    config, stream, fn, partials = mixes_inputs(device, hidden, rows, slices)
    for launch in cuda.mixes(device, config, stream=stream, fn=cuda.pack_fn(fn), partials=partials):
        launch()
    check_partials(partials, stream, fn, hidden)


@pytest.mark.parametrize("threads", [256, 512])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 3), (8, 2), (13, 1)])
def test_mixes_on_spare_blocks(
    device: torch.device, threads: int, rows: int, blocks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, stream, fn, partials = mixes_inputs(device, 256, rows, 3)
    path = tmp_path_factory.getbasetemp() / "host.cu"
    path.write_text(HOST)
    fields = [
        ("stream", "const bf16*"),
        ("fn", "const float*"),
        ("partials", "float*"),
        ("slices", "int"),
        ("rows", "int"),
    ]
    module = jit.Source(path, {"host": jit.Params("Host", fields)}).build(device, HIDDEN=256, HC=4)
    shared = 256 + cuda.MIX_SHARED_BYTES
    values = {"stream": stream, "fn": cuda.pack_fn(fn), "partials": partials, "slices": 3, "rows": rows}
    module.launch("host", grid=blocks, block=threads, shared=shared, **values)()
    check_partials(partials, stream, fn, 256)


def test_fewer_slices_than_registers_hold_are_refused(device: torch.device) -> None:
    config, stream, fn, partials = mixes_inputs(device, 256, 1, 1)
    assert cuda.mix_slices(config) == 2
    with pytest.raises(ValueError, match="1 slices"):
        cuda.mixes(device, config, stream=stream, fn=cuda.pack_fn(fn), partials=partials)


def test_packing_of_fn_is_undone() -> None:
    fn = random(24, 512)
    assert torch.equal(cuda.unpack_fn(cuda.pack_fn(fn)), fn)


def test_a_row_of_mixes_does_not_depend_on_the_others(device: torch.device) -> None:
    config, stream, fn, partials = mixes_inputs(device, 256, 13, 2)
    alone = torch.empty(1, 2, cuda.MIX_RECORD, device=device)
    for launch in cuda.mixes(device, config, stream=stream, fn=cuda.pack_fn(fn), partials=partials):
        launch()
    for launch in cuda.mixes(device, config, stream=stream[7:8].contiguous(), fn=cuda.pack_fn(fn), partials=alone):
        launch()
    assert torch.equal(partials[7:8, :, :25], alone[..., :25])


# -- boundary ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "rows", "world"), [(128, 1, 1), (128, 6, 4), (128, 9, 2), (256, 48, 8), (5120, 2, 4), (5120, 6, 1)]
)
def test_boundary(device: torch.device, hidden: int, rows: int, world: int) -> None:
    case = Case.make(device, hidden, rows, world)
    stream = case.run()
    check_behind(case, stream, check_expand(case, stream))


@pytest.mark.parametrize(
    "tile", [cuda.Tiling(1, 1), cuda.Tiling(1, 2), cuda.Tiling(2, 1), cuda.Tiling(2, 2), cuda.Tiling(8, 1)]
)
@pytest.mark.parametrize("early", [False, True])
def test_tilings(device: torch.device, tile: cuda.Tiling, early: bool) -> None:
    case = Case.make(device, 256, 3, 2)
    stream = case.run(tile=tile, mixes_early=early)
    check_behind(case, stream, check_expand(case, stream))


@pytest.mark.parametrize(("rows", "with_engram"), [(70, False), (40, True)])
@pytest.mark.parametrize("early", [False, True])
def test_clusters_with_several_rows(device: torch.device, rows: int, with_engram: bool, early: bool) -> None:
    between = Case.make(device, 128, rows, 2).run()
    case = Case.make(device, 128, rows, 2)
    assert cuda.rows_per_cluster(rows, 4, engram=with_engram) == 2
    stream = case.run(inject=case.inject if with_engram else None, mixes_early=early)
    if with_engram:
        check_inject(case, between, stream)
    else:
        check_expand(case, stream)
    check_behind(case, stream, case.coefficients()[0])


def test_boundary_in_place(device: torch.device) -> None:
    case = Case.make(device, 128, 6, 2)
    want, own = case.run(), case.stream.clone()
    case.run(stream_in=own, stream_out=own)
    assert torch.equal(own.cpu(), want)


def test_nothing_wanted_but_the_stream(device: torch.device) -> None:
    case = Case.make(device, 128, 6, 2)
    want = case.run()
    case = Case.make(device, 128, 6, 2)
    assert torch.equal(case.run(collapsed=None, taps=None), want)
    assert bool((case.collapsed.codes == 0x7F).all())


def test_final_boundary_writes_no_stream(device: torch.device) -> None:
    case = Case.make(device, 128, 9, 2)
    stream = case.run(taps=None)
    want = replace(case.collapsed, hidden=None if case.collapsed.hidden is None else case.collapsed.hidden.clone())
    case = Case.make(device, 128, 9, 2)
    wanted = replace(case.collapsed, codes=None, scales=None)
    assert bool(case.run(stream_out=None, taps=None, collapsed=wanted).isnan().all())
    assert torch.equal(case.collapsed.hidden, want.hidden)  # type: ignore[arg-type]
    assert torch.equal(from_fragments(case.collapsed.bf16, 9), from_fragments(want.bf16, 9))  # type: ignore[arg-type]
    assert stream.isfinite().all()


@pytest.mark.parametrize(("hidden", "rows", "world"), [(128, 1, 4), (128, 9, 1), (5120, 2, 4)])
def test_boundary_with_engram(device: torch.device, hidden: int, rows: int, world: int) -> None:
    case = Case.make(device, hidden, rows, world)
    between = case.run()  # what the Engram adds to, as the kernel itself rounds it
    case = Case.make(device, hidden, rows, world)
    stream = case.run(inject=case.inject)
    check_inject(case, between, stream)
    check_behind(case, stream, case.coefficients()[0])


def check_inject(case: Case, between: Tensor, stream: Tensor) -> None:
    config = case.config
    kv = case.sum(case.inject.kv).double().unflatten(-1, (-1, config.hidden_size))
    weights = engram.Weights(None, case.inject.query_weight.cpu(), case.inject.key_weight.cpu())  # type: ignore[arg-type]
    gate = engram.gate(between, kv[:, :-1], weights, config)
    exact, magnitude = between.double() + gate * kv[:, -1:], between.double().abs() + gate * kv[:, -1:].abs()
    # The gate is the root of a product of order 1 / sqrt(hidden) that cancels: its error is larger than a sum's.
    assert_rounds(stream, exact, magnitude * 64, "stream with Engram")
    wrong = between.double() + gate.flip(1) * kv[:, -1:]
    assert not torch.allclose(exact, wrong, atol=0.05), "the gates of the copies are too equal to tell them apart"


@pytest.mark.parametrize("with_engram", [False, True])
def test_embedding(device: torch.device, with_engram: bool) -> None:
    case = Case.make(device, 128, 9, 2)
    config = case.config
    table = random(config.vocab_size, 128, seed="embedding").bfloat16().to(device)
    tokens = torch.tensor([5, 0, config.vocab_size - 1, 7, 7, 1, 2, 3, 4], dtype=torch.int32, device=device)
    out = torch.full_like(case.stream, float("nan"))
    for launch in cuda.embed(
        device,
        config,
        row_token=tokens,
        row_slot=case.row_slot,
        embedding=table,
        stream_out=out,
        inject=case.inject if with_engram else None,
        taps=case.taps,
        collapsed=case.collapsed,
    ):
        launch()
    copies = table[tokens.long()].cpu().unsqueeze(1).expand(-1, 4, -1)
    if with_engram:
        check_inject(case, copies, out.cpu())
    else:
        assert torch.equal(out.cpu(), copies)
    check_behind(case, out.cpu(), reference.first_pre(9, config, torch.device("cpu")))


@pytest.mark.parametrize("weight", [1e-8, 0.0])
def test_gate_of_nearly_orthogonal_keys(device: torch.device, weight: float) -> None:
    """The root is taken of at least 1e-6; without a product the gate is one half. Half the value cancels exactly."""
    case = Case.make(device, 128, 4, 1)
    value = case.sum(case.inject.kv)[:, -128:]
    inject = replace(case.inject, query_weight=case.inject.query_weight * weight)
    out = embed_with(case, -0.5 * value, inject)
    kv = case.sum(case.inject.kv).double().unflatten(-1, (-1, 128))
    weights = engram.Weights(None, inject.query_weight.cpu(), inject.key_weight.cpu())  # type: ignore[arg-type]
    copies = (-0.5 * value).unsqueeze(1).expand(-1, 4, -1)
    gate = engram.gate(copies, kv[:, :-1], weights, case.config)
    assert bool(((gate - 0.5).abs() > 1e-4).all()) == (weight > 0)
    # What is left is 2^-11 of the terms, so float32 errors reach a tie of bf16 in one case of thirty.
    assert_rounds(out, copies.double() + gate * kv[:, -1:], value.double().abs().unsqueeze(1), "stream", nearest=0.9)


@pytest.mark.parametrize("tiny", ["keys", "stream"])
def test_epsilon_decides_for_tiny_keys_and_streams(device: torch.device, tiny: str) -> None:
    case = Case.make(device, 128, 4, 1)
    embedded = case.stream[:, 0].cpu()
    if tiny == "keys":
        case.inject.kv[..., : 4 * 128] *= 1e-10
    else:
        embedded = (embedded * 1e-10).bfloat16()
    copies = embedded.unsqueeze(1).expand(-1, 4, -1)
    check_inject(case, copies, embed_with(case, embedded, case.inject))


def embed_with(case: Case, embedded: Tensor, inject: cuda.Inject) -> Tensor:
    """The stream that an Engram behind the embedding makes of `embedded` [rows, hidden]."""
    device, rows = case.stream.device, case.rows
    table = torch.zeros(case.config.vocab_size, embedded.shape[1], dtype=torch.bfloat16, device=device)
    table[:rows] = embedded.to(device)
    out = torch.full_like(case.stream, float("nan"))
    for launch in cuda.embed(
        device,
        case.config,
        row_token=torch.arange(rows, dtype=torch.int32, device=device),
        row_slot=None,
        embedding=table,
        stream_out=out,
        inject=inject,
    ):
        launch()
    return out.cpu()


@pytest.mark.parametrize(("rows", "world"), [(1, 8), (9, 2)])
def test_main(device: torch.device, rows: int, world: int) -> None:
    case = Case.make(device, 128, rows, world)
    for launch in cuda.main(
        device, case.config, mailbox=case.mailbox, row_slot=case.row_slot, collapsed=case.collapsed
    ):
        launch()
    assert case.collapsed.hidden is not None
    assert torch.equal(case.collapsed.hidden.cpu(), case.sum(case.mailbox))
    case.taps = replace(case.taps, values=None)
    check_behind(case, case.sum(case.mailbox).unsqueeze(1), torch.ones(rows, 1, dtype=torch.float64))


@pytest.mark.parametrize("with_engram", [False, True])
def test_inactive_rows_are_zero_whatever_their_inputs_hold(device: torch.device, with_engram: bool) -> None:
    case = Case.make(device, 128, 9, 2)
    inject = case.inject if with_engram else None
    want = case.run(inject=inject)
    idle = torch.tensor([0, 3, 8])
    case = Case.make(device, 128, 9, 2)
    case.row_slot[idle] = -1
    case.partials[idle] = float("nan")
    for tensor in (case.mailbox, case.inject.kv):
        tensor[:, idle] = float("nan")
    case.stream[idle] = float("nan")
    got = case.run(inject=case.inject if with_engram else None)
    busy = torch.ones(9, dtype=torch.bool)
    busy[idle] = False
    assert torch.equal(got[busy], want[busy])
    assert bool((got[idle] == 0).all())
    assert case.collapsed.bf16 is not None
    assert bool((from_fragments(case.collapsed.bf16.cpu(), 9)[idle] == 0).all())
    check_fp8(case.collapsed.codes, case.collapsed.scales, from_fragments(case.collapsed.bf16.cpu(), 9), "x")


def test_same_bits_again_and_beside_other_rows(device: torch.device) -> None:
    case = Case.make(device, 256, 6, 4)
    first, again = case.run(inject=case.inject), case.run(inject=case.inject)
    assert torch.equal(first, again)
    codes = case.collapsed.codes.clone()  # type: ignore[union-attr]
    case.partials[:5] = case.partials[1:6].clone()
    for tensor in (case.mailbox, case.inject.kv):
        tensor[:, :5] = tensor[:, 1:6].clone()
    case.stream[:5] = case.stream[1:6].clone()
    other = case.run(inject=case.inject)
    assert torch.equal(other[4], first[5])
    assert torch.equal(other[5], first[5])
    assert torch.equal(case.collapsed.codes[0, :, 4], codes[0, :, 5])  # type: ignore[index]


@pytest.mark.parametrize("scale", [1e-11, 1e-9, 1e4])
def test_epsilon_decides_for_tiny_rows(device: torch.device, scale: float) -> None:
    """Pitfall 11: rows whose mean square is near the epsilon of 1e-20."""
    case = Case.make(device, 128, 2, 1, scale=scale)
    case.mailbox *= scale
    stream = case.run(taps=None)
    case.taps = replace(case.taps, values=None)
    check_behind(case, stream, check_expand(case, stream))
    assert case.collapsed.hidden is not None
    assert case.collapsed.bf16 is not None
    normed = from_fragments(case.collapsed.bf16.cpu(), 2)
    wrong = rms_norm(case.collapsed.hidden.cpu(), case.collapsed.norm_weight.cpu(), 1e-6, NUM)
    assert torch.equal(normed, wrong) == (scale == 1e4)


@pytest.mark.parametrize("spread_of_logits", [0.1, 2.0, 10.0, 40.0])
def test_sinkhorn_to_float32(device: torch.device, spread_of_logits: float) -> None:
    """comb[0, k] - b comb[1, k] with b next to their quotient: what is left shows errors of 2^-17 of comb."""
    case = Case.make(device, 128, 8, 1)
    case.weights.scale[2] = spread_of_logits
    _, _, comb = case.coefficients()
    case.mailbox.zero_()
    numbers = torch.zeros_like(case.stream, device="cpu").double()
    for k in range(4):
        own = slice(32 * k, 32 * k + 32)
        numbers[:, 0, own] = comb[:, 1, k, None]
        numbers[:, 1, own] = -comb[:, 0, k, None]
    # Scaled to near 1 before rounding to bf16, so that both products are about equal.
    numbers = numbers / numbers.abs().amax((1, 2), keepdim=True)
    old = numbers.bfloat16()
    # The coefficients must stay those of the original stream: partial sums are given, the stream is replaced.
    got = case.run(stream_in=old.to(device), collapsed=None, taps=None)
    exact, magnitude = comb.mT @ old.double(), comb.mT @ old.double().abs()
    for k in range(4):
        own = slice(32 * k, 32 * k + 32)
        error = (got[:, k, own].double() - exact[:, k, own]).abs()
        assert bool((error <= exact[:, k, own].abs() * HALF_UNIT + magnitude[:, k, own] * 2.0**-18).all()), (
            f"column {k}"
        )


def test_tilings_divide_and_cover() -> None:
    for hidden in (128, 256, 5120, 32, 96):
        for rows in (1, 6, 33, 48, 67, 192):
            tile = cuda.tiling(hidden, rows)
            assert tile.workers(hidden) * tile.cluster * tile.pieces * 4 == hidden
            for blocks, with_engram in ((264, False), (132, True)):
                each = cuda.rows_per_cluster(rows, tile.cluster, engram=with_engram)
                assert 1 <= each <= 8
                assert blocks // tile.cluster * each >= rows
    assert cuda.tiling(5120, 6) == cuda.Tiling(8, 1)
    assert cuda.tiling(5120, 192) == cuda.Tiling(4, 1)
    assert cuda.rows_per_cluster(6, 8, engram=True) == 1
    assert cuda.rows_per_cluster(192, 4, engram=False) == 3
    assert cuda.rows_per_cluster(192, 4, engram=True) == 6


def test_wrong_shapes_are_named(device: torch.device) -> None:
    case = Case.make(device, 128, 6, 2)
    with pytest.raises(ValueError, match="stream_out"):
        case.run(stream_out=case.stream[:5].contiguous())
    with pytest.raises(ValueError, match="codes and scales"):
        case.run(collapsed=replace(case.collapsed, scales=None))
    with pytest.raises(ValueError, match="do not divide"):
        case.run(tile=cuda.Tiling(8, 1))
