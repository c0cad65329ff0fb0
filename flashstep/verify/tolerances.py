"""How far a backend may be from recorded numbers: every measure and every tolerance, each with its reason.

The strictest come first. Numbers marked "golden README" are those recommended beside the golden vectors; the others
extend the same measurements to quantities for which it names none, and say from what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Largest values that pass, by measure, and why these."""

    limits: Mapping[str, float]
    reason: str


# -- measures ---------------------------------------------------------------------------------------------------------


def rms(x: Tensor) -> float:
    """Root of the mean square over all entries."""
    return float(x.double().square().mean().sqrt())


def _differing(got: Tensor, want: Tensor) -> float:
    """Entries that are not equal, bit for bit where the types are."""
    if got.dtype == want.dtype and got.dtype.itemsize == 1:
        got, want = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    elif got.is_floating_point() or want.is_floating_point():
        got, want = got.double(), want.double()
    return float((got != want).sum())


def _error(got: Tensor, want: Tensor) -> Tensor:
    return (got.double() - want.double()).abs()


def _bf16_order(x: Tensor) -> Tensor:
    """bf16 values as integers that count the representable numbers, so that neighbours differ by 1."""
    bits = x.bfloat16().contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _bf16_steps(got: Tensor, want: Tensor) -> float:
    """Largest distance in bf16 steps. Where terms cancelled to far below the tensor's rms, 1e-5 of the rms is none."""
    steps = (_bf16_order(got) - _bf16_order(want)).abs()
    cancelled = _error(got, want) <= 1e-5 * rms(want)
    steps = steps.masked_fill(cancelled, 0)
    finite = bool(torch.isfinite(got.float()).all() and torch.isfinite(want.float()).all())
    return float(steps.max()) if finite else float("nan")


def _row_errors(got: Tensor, want: Tensor) -> Tensor:
    """The largest error of each row of logits."""
    return _error(got, want).amax(-1).flatten()


def _argmax_differs(got: Tensor, want: Tensor) -> Tensor:
    return got.argmax(-1) != want.float().argmax(-1)


def _clear_argmax(got: Tensor, want: Tensor) -> float:
    """Rows with another argmax although the recorded first two are more than 1 apart."""
    first, second = want.float().topk(2, dim=-1).values.unbind(-1)
    return float((_argmax_differs(got, want) & (first - second > 1)).sum())


def _jaccard(got: Tensor, want: Tensor) -> float:
    """Mean over rows of 1 - |common| / |either|, of sets [..., k] without duplicates, -1 pads; empty sets agree."""
    got, want = got.flatten(0, -2), want.flatten(0, -2)
    either = ((got >= 0).sum(-1) + (want >= 0).sum(-1)).double()
    common = ((got.unsqueeze(-1) == want.unsqueeze(-2)) & (got >= 0).unsqueeze(-1)).sum((-1, -2))
    return float((1 - torch.where(either > 0, common / (either - common), 1.0)).mean())


MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "differing": _differing,
    "max/rms": lambda got, want: float(_error(got, want).max()) / max(rms(want), 1e-30),
    "max": lambda got, want: float(_error(got, want).max()),
    "rel rms": lambda got, want: rms(got.double() - want.double()) / max(rms(want), 1e-30),
    "bf16 steps": _bf16_steps,
    "rms": lambda got, want: rms(got.double() - want.double()),
    "row median": lambda got, want: float(_row_errors(got, want).median()),
    "row max": lambda got, want: float(_row_errors(got, want).max()),
    "argmax differs": lambda got, want: float(_argmax_differs(got, want).double().mean()),
    "clear argmax differs": _clear_argmax,
    "rows differing": lambda got, want: float((got != want).any(-1).double().mean()),
    "jaccard distance": _jaccard,
}


# -- tolerances -------------------------------------------------------------------------------------------------------

EXACT = Tolerance({"differing": 0}, "integers and quantizer codes have one right value (golden README)")
F32 = Tolerance({"max/rms": 1e-5}, "float32 numbers differ by summation order alone (golden README)")
ENGRAM_GATE = Tolerance(
    {"max/rms": 1e-4}, "float32 numbers whose last step is the root of a sum near zero, which magnifies its rounding"
)
BF16 = Tolerance(
    {"bf16 steps": 1, "rel rms": 0.003},
    "one rounding to bf16, which another summation order can turn to the next value (golden README)",
)
SCORES_BF16 = Tolerance(
    {"max": 0.025}, "the published code rounds index scores to bf16 at three points (golden README)"
)
MOE = Tolerance(
    {"rel rms": 0.03, "max/rms": 0.25},
    "fp8 codes in front of the down product flip after a rounding (golden README: measured 0.015)",
)
GATE = Tolerance({"max/rms": 1e-5}, "scores and weights are float32 in any backend (golden README)")
MOE_F32 = Tolerance(
    {"rel rms": 0.005}, "as F32, but one fp8 code in front of the down product may stand at a tie and flip"
)
ATTENTION = Tolerance(
    {"rel rms": 0.08},
    "codes of fp8 inputs and entries flip after bf16 roundings (golden README: measured 0.03-0.056)",
)
FFN = Tolerance(
    {"rel rms": 0.03}, "codes of fp8 inputs flip after bf16 roundings (golden README: measured 0.012-0.019)"
)
CACHE = Tolerance(
    {"rel rms": 0.01},
    "a code flips where its input was rounded to the next bf16 value: one entry in a hundred, while a missing "
    "quantizer moves all of them by 0.03 (fp8) or more",
)
INDEX_SCORES = Tolerance(
    {"rel rms": 0.01, "max/rms": 0.1}, "the published code rounds these to bf16 at three points (0.0026 here)"
)
TWO_ROUNDINGS = Tolerance(
    {"bf16 steps": 2, "rel rms": 0.003},
    "a sum rounded to bf16, then its norm: one turned rounding in front is up to two steps behind (extends BF16)",
)
DRAFT_LOGITS = Tolerance({"max/rms": 0.01}, "the norm in front of the head rounds to bf16, which may turn once")
NOQUANT = Tolerance(
    {"row max": 1e-3}, "nothing is rounded that could flip (golden README: measured 1e-5 between summation orders)"
)
NOQUANT_CONFIDENCE = Tolerance({"max": 1e-4}, "nothing is rounded that could flip (golden README)")
SAME_LOGITS = Tolerance(
    {"row max": 1e-3}, "how a sequence is cut into forwards changes summation order alone; limit as for `noquant`"
)

# A row of logits closer than this has met no flip: one code moves logits by more.
AGREES = 1e-3
F32_SELECTIONS = Tolerance(
    {"differing": 0}, f"rows whose logits agree to {AGREES} have chosen alike (golden README: exact in f32)"
)
F32_VALUES = Tolerance(
    {"rel rms": 1e-3}, f"rows whose logits agree to {AGREES} have met no flip; limit as for their logits"
)
F32_HALF = Tolerance(
    {"prompts short of half": 0},
    f"at least half of the prompts have a row median below {AGREES}: a code that flips early moves all later rows of "
    "its prompt, and with the summation order alone changed half of the prompts of a larger configuration met one "
    "(golden README: 3 of 6)",
)
CHAIN_START = Tolerance({"differing": 0}, "a draft chain starts with the recorded next token")


@dataclass(frozen=True)
class EndToEnd:
    """Tolerances of a whole run, which depend on whether anything is selected."""

    f32_logits: Tolerance
    logits: Tolerance
    drafts: Tolerance
    draft_ids: Tolerance
    confidence: Tolerance
    stream: Tolerance
    output: Tolerance
    router_weights: Tolerance
    router: Tolerance
    draft_router: Tolerance
    index: Tolerance
    candidates: Tolerance
    coefficients: Tolerance


# Relative rms of streams by layer: the first and the last value, growing evenly in between.
DENSE_STREAM, FREE_STREAM = (0.02, 0.05), (0.05, 0.25)
# Score gaps at the cut above which a choice must not change: twice the largest at which rounding changed one here.
ROUTER_MARGIN, INDEX_MARGIN = 0.6, 2.4

_ids = "the two proposals are no further apart than two draft logits may be off"
DENSE = EndToEnd(
    f32_logits=Tolerance({"row max": 0.5}, "a few codes flip (golden README)"),
    logits=Tolerance({"rms": 0.18, "row max": 1.2, "clear argmax differs": 0}, "codes flip (golden README)"),
    drafts=Tolerance({"row max": 2.0}, "codes flip (golden README: measured 1.6)"),
    draft_ids=Tolerance({"logit gap": 4.0}, _ids),
    confidence=Tolerance({"rms": 0.15, "max": 0.6}, "codes flip (golden README: 0.37 at most; rms 0.07 here)"),
    stream=Tolerance({"of layer limit": 1.0}, f"relative rms by layer {DENSE_STREAM} (golden README)"),
    output=Tolerance({"rel rms": 0.15}, "attention's 0.08 from equal inputs, and the stream's 0.05 in front of it"),
    router_weights=Tolerance({"rel rms": 0.05}, "as the streams that they follow"),
    router=Tolerance({"differing": 0}, "every expert is active"),
    draft_router=Tolerance({"differing": 0}, "every expert is active"),
    index=Tolerance({"clear rows differing": 0, "jaccard distance": 0}, "every entry is kept"),
    candidates=Tolerance({"jaccard distance": 0}, "every block is kept"),
    coefficients=Tolerance({"rel rms": 0.05}, "as the streams that they follow"),
)
FREE = EndToEnd(
    f32_logits=Tolerance({"row max": 1.5}, "a few codes and choices flip (golden README)"),
    logits=Tolerance(
        {"rms": 0.5, "row median": 1.5, "row max": 4.0, "argmax differs": 0.2}, "codes and choices flip (golden README)"
    ),
    drafts=Tolerance(
        {"row median": 1.5, "row max": 8.0},
        "as dense where selections are equal; free runs also flip experts of the draft (median as the logits; largest "
        "row 4.2 here)",
    ),
    draft_ids=Tolerance({"logit gap": 4.0}, _ids),
    confidence=Tolerance({"rms": 0.4, "max": 2.0}, "codes and choices flip (rms 0.21, largest 1.0 here)"),
    stream=Tolerance({"of layer limit": 1.0}, f"relative rms by layer {FREE_STREAM} (0.11 between the two modes)"),
    output=Tolerance({"rel rms": 0.6}, "a sublayer that chooses other entries or experts gives another output"),
    router_weights=Tolerance({"rel rms": 0.05}, "rows with the same experts; as the dense streams"),
    router=Tolerance(
        {"clear rows differing": 0, "rows differing": 0.3},
        f"no other choice at a margin above {ROUTER_MARGIN} ; overall twice the 14 % between the modes",
    ),
    draft_router=Tolerance({"rows differing": 0.5}, "margins are not recorded; 0.21 was seen"),
    index=Tolerance(
        {"clear rows differing": 0, "jaccard distance": 0.45},
        f"no other choice at a margin above {INDEX_MARGIN} ; 0.14-0.29 between the modes",
    ),
    candidates=Tolerance({"jaccard distance": 0.45}, "as the index choices"),
    coefficients=Tolerance({"rel rms": 0.1}, "as the streams that they follow"),
)
