"""EngineConfig: how much an engine takes in at once, and how it decodes. Frozen; wrong values are refused together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rule = Literal["standard", "block", "synthetic"]
RULES: tuple[Rule, ...] = ("standard", "block", "synthetic")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine; names as vLLM's users know them. Raises ValueError that lists every problem.

    max_num_seqs: requests that run at once. max_num_batched_tokens: rows of one step, drafts included; None: what suits
    the backend.
    max_model_len: prompt and output of one request, in tokens; None: the model's own limit.
    kv_cache_memory: bytes for all caches: windows and open groups of max_num_seqs requests, and, with the rest, pages
    (compressed entries, index keys and the window entries behind the prefix cache).
    page_tokens: positions per page; a prefix hit ends at a page border.
    prefill_schedule_interval: prompts are worked on in every n-th step while requests are decoding.
    decode_slowdown: such a step may take so many times as long as one without prompts; chunks are sized by the times
    of recent steps. Infinity leaves max_num_batched_tokens as the only limit.
    max_queue: requests that may wait; one more is refused.
    num_speculative_tokens: drafts per step; None: the model's block size. rule: how drafts are accepted;
    synthetic_accepted: mean number of accepted drafts, with the rule "synthetic" (for timing alone).
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: int = 1 << 29
    page_tokens: int = 64
    enable_prefix_caching: bool = True
    prefill_schedule_interval: int = 1
    decode_slowdown: float = 1.7
    max_queue: int = 1024
    num_speculative_tokens: int | None = None
    rule: Rule = "standard"
    synthetic_accepted: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {getattr(self, name)!r}: expected at least {least}"
            for name, least in (
                ("max_num_seqs", 1),
                ("kv_cache_memory", 1),
                ("page_tokens", 1),
                ("prefill_schedule_interval", 1),
                ("max_queue", 0),
            )
            if getattr(self, name) < least
        ]
        if not self.decode_slowdown > 1:
            problems.append(f"decode_slowdown = {self.decode_slowdown}: expected more than 1")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            problems.append(f"max_num_batched_tokens = {self.max_num_batched_tokens}: expected at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            problems.append(f"max_model_len = {self.max_model_len}: expected at least 2")
        if self.rule not in RULES:
            problems.append(f"rule = {self.rule!r}: expected one of {', '.join(RULES)}")
        if (self.rule == "synthetic") != (self.synthetic_accepted is not None):
            problems.append("synthetic_accepted goes with the rule 'synthetic', and only with it")
        if self.synthetic_accepted is not None and not math.isfinite(self.synthetic_accepted):
            problems.append(f"synthetic_accepted = {self.synthetic_accepted}: expected a number")
        if problems:
            raise ValueError("engine settings: " + "; ".join(problems))
