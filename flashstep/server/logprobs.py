"""Log-probabilities in OpenAI's two shapes: parallel lists for completions, records for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashstep.chat import StreamingDetokenizer, Tokenizer
from flashstep.requests import TokenLogprob

_FLOOR = -9999.0  # what OpenAI reports for a token that cannot be; JSON has no infinity


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or `bytes:\\x..` for one that is no whole text, so that different tokens look different."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`."""
    return [
        _record(tokenizer, entry.token, entry.logprob)
        | {"top_logprobs": [_record(tokenizer, token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


def _record(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_label(tokenizer, token),
        "logprob": max(logprob, _FLOOR),
        "bytes": list(tokenizer.token_bytes(token)),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, a few tokens at a time; offsets count characters from the start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._offset = 0

    def push(self, entries: Sequence[tuple[int, TokenLogprob | None]], *, hidden: int = 0) -> dict[str, Any]:
        """Lists for the next tokens. The first `hidden` ones have no text in the answer (the begin token).

        The first token of a prompt has no probability: None stands there, as in OpenAI's echo.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for place, (token, entry) in enumerate(entries):
            tokens.append(token_label(self._tokenizer, token))
            offsets.append(self._offset)
            if place >= hidden:
                self._offset += sum(len(piece.text) for piece in self._detokenizer.push(token))
            if entry is None:
                logprobs.append(None)
                top.append(None)
                continue
            logprobs.append(max(entry.logprob, _FLOOR))
            # The token itself is always among them, and so is the better one of two with the same label.
            likely: dict[str, float] = {}
            for other, logprob in (*entry.top, (entry.token, entry.logprob)):
                likely.setdefault(token_label(self._tokenizer, other), max(logprob, _FLOOR))
            top.append(likely)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}
