"""What may go wrong among ranks, as errors; and what tests break on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class AgreementError(ValueError):
    """The ranks cannot start together. The message names every rank and what it misses; all ranks fail with it."""


class RankFailure(RuntimeError):  # noqa: N818 - the failure is of a rank, and names it
    """A rank died, hung, failed or differs from the others; the message names it and the step. All ranks end."""


class PeerLost(RuntimeError):  # noqa: N818 - not an error of the rank that notices
    """A collective broke off because another rank has gone; the watch knows which one and why."""


@dataclass(frozen=True)
class Faults:
    """What to break, for tests; a launch without it breaks nothing. Steps count forwards, from 1."""

    weights: Mapping[int, Path] = field(default_factory=dict)  # rank -> other model directory that it reads
    missing: Mapping[int, str] = field(default_factory=dict)  # rank -> phrase of a requirement that it misses
    # (rank, step): this rank receives every sum with the wrong sign. One wrong value may drown in a large residual, or
    # meet a sublayer that the model does not use for that token, and then changes nothing.
    corrupt_sums: tuple[int, int] | None = None
    hang: tuple[int, int] | None = None  # (rank, step): it lives on, but never finishes the step
