"""What a request may ask of sampling.

Owns the parameters, their meaning and their limits; the reference of the accept stage says how each is applied.
Imports no tensor library, so that the server can refuse a request without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class InvalidSamplingParams(ValueError):  # noqa: N818 - named for what it says to a user
    """Sampling parameters that cannot be honoured; `problems` has one line per field: found and wanted."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("invalid sampling parameters: " + "; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, with the meaning that OpenAI and vLLM give to the names.

    temperature: logits are divided by it; exactly 0 is greedy, and then top_k, top_p, min_p and seed have no effect.
    top_k: only the k most likely tokens; 0 is off (a server maps vLLM's -1 to 0).
    top_p: only the smallest set of most likely tokens whose mass reaches it; 1 is off.
    min_p: only tokens at least min_p times as likely as the most likely one; 0 is off.
    seed: int64; the same seed gives the same tokens for the same logits and the same rows per step. None lets the
        engine choose.
    repetition_penalty: tokens of the prompt or the output have a positive logit divided by it, any other multiplied.
    presence_penalty: taken once from the logit of each token that the output contains; the prompt does not count.
    frequency_penalty: taken from the logit of a token once per occurrence in the output.
    logit_bias: token id -> added to the logit; minus infinity bans the token.

    Raises InvalidSamplingParams with every problem at once. Use `from_fields` for names that a user supplied.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        problems = _problems({f.name: getattr(self, f.name) for f in fields(self)})
        if problems:
            raise InvalidSamplingParams(problems)
        # A copy: the caller's dictionary may change later. Not a proxy, because those cannot be sent to other ranks.
        object.__setattr__(self, "logit_bias", {token: float(bias) for token, bias in self.logit_bias.items()})

    @property
    def penalizes(self) -> bool:
        """Whether the tokens written so far, or those of the prompt, change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def filters(self) -> bool:
        """Whether tokens are left out before one is drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Parameters from names and values; unknown names are reported together with invalid values."""
        known = [f.name for f in fields(cls)]
        unknown = [f"{name}: found an unknown field, wanted one of {', '.join(known)}" for name in given.keys() - known]
        problems = sorted(unknown) + _problems({name: given[name] for name in known if name in given})
        if problems:
            raise InvalidSamplingParams(problems)
        return cls(**given)


def _is_int(value: Any) -> bool:
    # True and False are ints to Python, but `"top_k": true` is a client's mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return (_is_int(value) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value))


def _is_bias(token: Any, bias: Any) -> bool:
    return _is_int(token) and token >= 0 and (_is_finite(bias) or bias == -math.inf)


_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a finite number >= 0", lambda v: _is_finite(v) and v >= 0),
    "top_k": ("an integer >= 0 (0 is off)", lambda v: _is_int(v) and v >= 0),
    "top_p": ("a number in (0, 1]", lambda v: _is_finite(v) and 0 < v <= 1),
    "min_p": ("a number in [0, 1]", lambda v: _is_finite(v) and 0 <= v <= 1),
    "seed": ("None or a 64-bit signed integer", lambda v: v is None or (_is_int(v) and -(2**63) <= v < 2**63)),
    "repetition_penalty": ("a finite number > 0", lambda v: _is_finite(v) and v > 0),
    "presence_penalty": ("a number in [-2, 2]", lambda v: _is_finite(v) and -2 <= v <= 2),
    "frequency_penalty": ("a number in [-2, 2]", lambda v: _is_finite(v) and -2 <= v <= 2),
    "logit_bias": (
        "a mapping from token ids >= 0 to finite numbers or minus infinity",
        lambda v: isinstance(v, Mapping) and all(_is_bias(token, bias) for token, bias in v.items()),
    ),
}


def _problems(values: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in values.items():
        wanted, is_valid = _WANTED[name]
        if is_valid(value):
            continue
        found = value
        if isinstance(value, Mapping):  # a bias may name thousands of tokens: show the wrong ones
            found = {token: bias for token, bias in value.items() if not _is_bias(token, bias)}
        problems.append(f"{name}: found {found!r}, wanted {wanted}")
    return problems
