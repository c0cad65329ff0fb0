"""Usage of an answer: the figures of its choices added up, in OpenAI's shape and with DSpark's under their own name.

OpenAI's `accepted_prediction_tokens` are about text that the client predicted; drafts are the engine's own business and
are reported as `usage.dspark`, and step by step to whoever asks for `dspark_details`.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from flashstep.chat import StreamingDetokenizer, Tokenizer
from flashstep.requests import Delta, Usage


class UsageSum:
    """Adds the usage of choices as they end. A prompt counts once, however many choices it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._ended: list[Usage] = []
        self._reasoning_tokens = 0

    def add(self, prompt: int, usage: Usage, reasoning_tokens: int = 0) -> None:
        """Count one choice of the prompt with that number."""
        first = self._prompts.setdefault(prompt, usage)
        if usage.cached_tokens < first.cached_tokens:  # later choices find what the first one left in the cache
            self._prompts[prompt] = usage
        self._ended.append(usage)
        self._reasoning_tokens += reasoning_tokens

    def as_dict(self) -> dict[str, Any]:
        """The `usage` object."""
        prompt_tokens = sum(usage.prompt_tokens for usage in self._prompts.values())
        completion_tokens = sum(usage.completion_tokens for usage in self._ended)
        drafted, accepted = (
            [sum(column) for column in zip_longest(*rows, fillvalue=0)]
            for rows in ([usage.drafted for usage in self._ended], [usage.accepted for usage in self._ended])
        )
        several = [usage for usage in self._ended if usage.steps > 1]
        steps_after_first = sum(usage.steps - 1 for usage in several)
        tokens_after_first = sum(usage.completion_tokens - 1 for usage in several)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in self._prompts.values())},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "dspark": {
                "steps": sum(usage.steps for usage in self._ended),
                "drafted": sum(drafted),
                "accepted": sum(accepted),
                "drafted_per_position": drafted,
                "accepted_per_position": accepted,
                "tokens_per_step": tokens_after_first / steps_after_first if steps_after_first else 0.0,
                "synthetic": any(usage.synthetic for usage in self._ended),
            },
        }


class StepDetails:
    """What each step of a choice did: its tokens, the first `accepted` of which were drafts, and each token's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = StreamingDetokenizer(tokenizer)

    def push(self, delta: Delta) -> dict[str, Any]:
        """The `dspark` object of a stream's choice. A token that ends inside a character has no text."""
        texts = ["".join(piece.text for piece in self._detokenizer.push(token)) for token in delta.tokens]
        return {"tokens": delta.tokens, "texts": texts, "accepted": delta.accepted, "drafted": delta.drafted}
