"""Mistakes that are easily made in this model, planted one by one: each must fail verification, and where expected.

The truth is recorded numbers (`../shared/golden`), cut to one prompt of 41 tokens and a few steps.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashstep import ops
from flashstep.formats import Numerics, fp4_round_trip, fp4_ue8m0_scale
from flashstep.stages.attention import reference as attention
from flashstep.stages.boundary import reference as boundary
from flashstep.stages.engram import reference as engram
from flashstep.stages.moe import reference as moe
from flashstep.state import State
from flashstep.verify import Report, verify

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "a"
STEPS = 10
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden vectors in ../shared/golden")

Plant = Callable[[pytest.MonkeyPatch], None]


def cut(tensors: dict[str, torch.Tensor], prefix: str, names: tuple[str, ...], length: int) -> dict[str, torch.Tensor]:
    """What the first STEPS decode steps recorded, of `names` behind `prefix`."""
    kept = {}
    for name in names:
        value = tensors[prefix + name]
        rows = length + STEPS
        kept[prefix + name] = value[:, :rows] if name in ("index_sel", "router_idx") else value[:STEPS]
        if name == "prefill_logits":
            kept[prefix + name] = value
    return {name: value.contiguous() for name, value in kept.items()}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration A with: the layers file, f32 with and without choices, no quantizers."""
    directory = tmp_path_factory.mktemp("golden")
    vectors = directory / "vectors"
    vectors.mkdir()
    for file in GOLDEN.iterdir():
        if file.is_file():
            os.link(file, directory / file.name) if file.stat().st_dev == directory.stat().st_dev else shutil.copy(
                file, directory
            )
    shutil.copy(GOLDEN / "vectors" / "layers.safetensors", vectors)
    logits = ("prefill_logits", "decode_logits", "draft_ids", "draft_logits", "confidence")
    for file in ("p3", "dense_p3"):
        tensors = load_file(GOLDEN / "vectors" / f"{file}.safetensors")
        length = len(tensors["prompt"])
        kept = {"prompt": tensors["prompt"], "decode_tokens": tensors["decode_tokens"][: STEPS + 1].contiguous()}
        kept |= cut(tensors, "f32.", logits, length)
        if file == "p3":
            kept |= cut(tensors, "", ("index_sel",), length)
        save_file(kept, vectors / f"{file}.safetensors")
    save_file(
        cut(load_file(GOLDEN / "vectors" / "noquant.safetensors"), "p3.", logits, length),
        vectors / "noquant.safetensors",
    )
    return directory


def failed(report: Report) -> set[tuple[str, str, str]]:
    return {(row.file, row.quantity, row.mode) for row in report.failures}


DENSE = ("dense_p3", "prefill_logits + decode_logits", "f32")
FREE = ("p3", "prefill_logits + decode_logits", "f32")
MEDIANS = ("dense_p3", "prompts that agree", "f32")
NOQUANT = ("noquant", "p3.prefill_logits + decode_logits", "noquant")


def wrap(
    patch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def engram_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engram, "inject", lambda stream, *_: stream)


def no_inverse_rope(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, attention, "rotate", lambda f: lambda x, t, num, back=False: x if back else f(x, t, num))


def no_sink(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        attention,
        "attend",
        lambda f: lambda q, kv, seen, sink, num: f(q, kv, seen, torch.full_like(sink, -torch.inf), num),
    )


def no_clamp(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, moe, "gate_up", lambda f: lambda x, e, v, w, limit, num: f(x, e, v, w, torch.inf, num))


def no_yarn(patch: pytest.MonkeyPatch) -> None:
    def make(init: Callable[..., None]) -> Callable[..., None]:
        def unscaled(self: ops.Rope, config: Any, **keywords: Any) -> None:
            init(self, replace(config, rope_scaling=replace(config.rope_scaling, factor=1.0)), **keywords)

        return unscaled

    wrap(patch, ops.Rope, "__init__", make)


def one_sinkhorn_iteration(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, boundary, "sinkhorn", lambda f: lambda comb, _, eps: f(comb, 1, eps))


def route_factor_one(patch: pytest.MonkeyPatch) -> None:
    def make(route: Callable[..., Any]) -> Callable[..., Any]:
        def unscaled(x: torch.Tensor, w: Any, config: Any) -> Any:
            chosen, weights = route(x, w, config)
            return chosen, weights / config.routed_scaling_factor

        return unscaled

    wrap(patch, moe, "route", make)


def window_one_short(patch: pytest.MonkeyPatch) -> None:
    def make(positions: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def short(self: State, last: torch.Tensor) -> torch.Tensor:
            found = positions(self, last).clone()
            found[:, 0] = -1
            return found

        return short

    wrap(patch, State, "window_positions", make)


def power_of_two_scales(patch: pytest.MonkeyPatch) -> None:
    def kv_fp4(self: Numerics, x: torch.Tensor) -> torch.Tensor:
        return fp4_round_trip(x, *fp4_ue8m0_scale(x)) if self.quantize else x

    patch.setattr(Numerics, "kv_fp4", kv_fp4)


def pre_at_once(patch: pytest.MonkeyPatch) -> None:
    latest: list[torch.Tensor] = []

    def mixes(f: Callable[..., Any]) -> Callable[..., Any]:
        def remember(*arguments: Any) -> Any:
            found = f(*arguments)
            latest[:] = [found[0]]
            return found

        return remember

    wrap(patch, boundary, "mixes", mixes)
    # Single sublayers from recorded operands may have no coefficients of their own yet.
    wrap(
        patch,
        boundary,
        "collapse",
        lambda f: lambda stream, pre, num: f(stream, latest[0] if len(latest[0]) == len(stream) else pre, num),
    )


def comb_transposed(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        boundary,
        "expand",
        lambda f: lambda y, stream, post, comb, num: f(y, stream, post, comb.transpose(1, 2), num),
    )


def window_unquantized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "window_entry", lambda latent, turns, num: ops.rotate(latent, turns, num))


def entries_unquantized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Numerics, "kv_fp4", lambda self, x: x)


def keys_of_last_writer(patch: pytest.MonkeyPatch) -> None:
    """An indexer scores the keys of whichever source wrote last: another layer's while a group is open."""
    writers: list[int] = []

    def write(f: Callable[..., None]) -> Callable[..., None]:
        def noting(self: State, source: int, slots: Any, entries: torch.Tensor, *rest: Any) -> None:
            if len(entries):
                writers[:] = [source]
            f(self, source, slots, entries, *rest)

        return noting

    wrap(patch, State, "write_entries", write)
    wrap(patch, State, "read_index_keys", lambda f: lambda self, _, slot, count: f(self, writers[0], slot, count))


def norm_on_queries(patch: pytest.MonkeyPatch) -> None:
    def make(project: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def normed(*arguments: Any) -> torch.Tensor:
            q = project(*arguments)
            return (q.double() * ops.inverse_rms(q.double(), 1e-20)).to(q.dtype)

        return normed

    wrap(patch, attention, "project_q", make)


def final_collapse_by_mean(patch: pytest.MonkeyPatch) -> None:
    """The last collapse takes every copy alike instead of the last sublayer's coefficients."""
    calls = [0]

    def first(f: Callable[..., Any]) -> Callable[..., Any]:
        def reset(*arguments: Any) -> Any:
            calls[0] = 0
            return f(*arguments)

        return reset

    def collapse(f: Callable[..., Any]) -> Callable[..., Any]:
        def counted(stream: torch.Tensor, pre: torch.Tensor, num: Numerics) -> Any:
            last = calls[0] == 16  # two sublayers in each of the 8 layers went before
            calls[0] += 1
            return f(stream, torch.full_like(pre, 1 / pre.shape[-1]) if last else pre, num)

        return counted

    wrap(patch, boundary, "first_pre", first)
    wrap(patch, boundary, "collapse", collapse)


# What must fail, of everything that does: the end-to-end figure, and the narrowest quantity where there is one.
MISTAKES: dict[Plant, set[tuple[str, str, str]]] = {
    engram_left_out: {NOQUANT, DENSE, ("layers", "layer.1.stream_engram", "")},
    no_inverse_rope: {NOQUANT, DENSE, ("layers", "layer.0.attn_out", "")},
    no_sink: {NOQUANT, DENSE, ("layers", "layer.0.attn_out", "")},
    no_clamp: {NOQUANT, DENSE, ("layers", "layer.0.ffn_out", "")},
    no_yarn: {NOQUANT, ("layers", "cache.compressed.2", "")},
    one_sinkhorn_iteration: {NOQUANT, ("layers", "layer.0.hc_attn_comb", "")},
    route_factor_one: {NOQUANT, ("layers", "layer.0.ffn_out", ""), ("layers", "layer.0.router_sel (weights)", "")},
    window_one_short: {NOQUANT, MEDIANS},
    power_of_two_scales: {MEDIANS, ("layers", "cache.compressed.2", "")},
    pre_at_once: {NOQUANT, MEDIANS, ("layers", "layer.1.attn_in", "")},
    comb_transposed: {NOQUANT, MEDIANS, ("layers", "layer.0.stream_mid", "")},
    window_unquantized: {MEDIANS, ("layers", "cache.window.0", "")},
    entries_unquantized: {MEDIANS, ("layers", "cache.compressed.2", "")},
    keys_of_last_writer: {NOQUANT},
    norm_on_queries: {NOQUANT, DENSE, ("layers", "layer.0.attn_out", "")},
    final_collapse_by_mean: {NOQUANT, MEDIANS},
}


def test_without_a_mistake(golden: Path) -> None:
    report = verify(golden)
    assert report.passed, report.failures
    compared = {(row.file, row.quantity, row.mode) for row in report.rows}
    expected = set().union(*MISTAKES.values())
    assert expected <= compared, expected - compared


@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_mistake_is_caught(golden: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    caught = failed(verify(golden))
    assert MISTAKES[plant] <= caught, f"not caught: {MISTAKES[plant] - caught}"
