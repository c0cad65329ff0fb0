"""/v1/completions: prompts to engine requests, deltas to text with its log-probabilities."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from flashstep.chat import Tokenizer
from flashstep.requests import Delta, GenerationRequest, Usage
from flashstep.server.errors import bad_request
from flashstep.server.interface import Serving
from flashstep.server.logprobs import CompletionLogprobs
from flashstep.server.protocol import CompletionBody
from flashstep.server.tool_grammar import answer_grammar
from flashstep.server.usage import StepDetails, UsageSum

MAX_PROMPTS = 1024
MAX_ANSWERS = 1024  # prompts x n of one request
# More is encoded or decoded on a thread, so that streams of others go on meanwhile.
_LONG_TEXT_CHARS = 16_384


def encode(tokenizer: Tokenizer, text: str, param: str) -> list[int]:
    """Ids of a text from a request. Raises 400 for text that is none."""
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise bad_request(param, str(error)) from error


def decode(tokenizer: Tokenizer, ids: list[int], param: str) -> str:
    """Text of ids from a request. Raises 400 for unknown ones."""
    try:
        return tokenizer.decode(ids)
    except ValueError as error:
        raise bad_request(param, str(error)) from error


async def completion_job(body: CompletionBody, serving: Serving) -> CompletionJob:
    """The job that answers `body`. Raises ApiError, and what SamplingParams raise."""
    model = serving.model(body.model)
    tokenizer = serving.engine.tokenizer
    prompts: list[_Prompt] = []
    given = body.prompt
    # An empty list is an empty prompt; the engine says what it thinks of that.
    if isinstance(given, str) or not given or isinstance(given[0], int):
        given = [given]  # type: ignore[assignment, list-item]
    if len(given) > MAX_PROMPTS:
        raise bad_request("prompt", f"{len(given)} prompts found, wanted at most {MAX_PROMPTS}")
    if len(given) * body.n > MAX_ANSWERS:
        raise bad_request("n", f"{len(given)} prompts x {body.n} choices found, wanted at most {MAX_ANSWERS} answers")
    begin = [tokenizer.bos_id] if body.add_special_tokens else []

    def read() -> list[_Prompt]:
        for prompt in given:
            if isinstance(prompt, str):
                ids = encode(tokenizer, prompt, "prompt")
                prompts.append(_Prompt(prompt, (*begin, *ids), len(begin)))
            else:
                assert isinstance(prompt, list), "the model of the body allows texts and lists of ids"
                # What the text of ids is, only an echo asks; unknown ids are the engine's to refuse.
                text = decode(tokenizer, prompt, "prompt") if body.echo else ""
                prompts.append(_Prompt(text, tuple(prompt), 0))
        return prompts

    is_long = sum(len(prompt) for prompt in given if not isinstance(prompt, int)) > _LONG_TEXT_CHARS
    return CompletionJob(body, model, await asyncio.to_thread(read) if is_long else read(), tokenizer)


@dataclass(frozen=True)
class _Prompt:
    text: str  # of ids, where it is echoed
    ids: tuple[int, ...]
    hidden: int  # ids at the start that we added


class _Choice:
    """What has arrived of one choice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text: list[str] = []
        self.logprobs = CompletionLogprobs(tokenizer)
        self.steps = StepDetails(tokenizer)
        self.logprob_lists: dict[str, list[Any]] = {}
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.echoed = False


class CompletionJob:
    """Choices of all prompts: those of the first prompt come first."""

    def __init__(self, body: CompletionBody, model: str, prompts: list[_Prompt], tokenizer: Tokenizer) -> None:
        self.stream, self.include_usage = body.stream, body.stream_options.include_usage
        self._body, self._prompts = body, prompts
        self.field_names = {"prompt_logprobs": "logprobs"}
        if body.structured_outputs is not None:  # the engine calls a schema by its usual name
            self.field_names |= {"grammar": "structured_outputs", "response_format": "structured_outputs"}
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # Scoring a prompt needs one forward step, which brings a token that nobody asked for.
        self._drops_output = body.max_tokens == 0
        grammar = answer_grammar(body.structured_outputs, body.response_format)
        self.requests = [
            GenerationRequest(
                prompt=prompt.ids,
                params=body.sampling_params(choice),
                max_tokens=max(body.max_tokens, 1),
                min_tokens=body.min_tokens,
                stop=body.stops(),
                stop_token_ids=frozenset(body.stop_token_ids),
                ignore_eos=body.ignore_eos,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                grammar=grammar,
            )
            for prompt in prompts
            for choice in range(body.n)
        ]
        self._choices = [_Choice(tokenizer) for _ in self.requests]
        self._usage = UsageSum()

    def push(self, index: int, delta: Delta) -> dict[str, Any]:
        """Take a delta of choice `index`; the chunk that a stream sends for it."""
        choice = self._choices[index]
        prompt = self._prompts[index // self._body.n]
        text = ""
        entries: list[Any] = []
        hidden = 0
        if self._body.echo and not choice.echoed:
            choice.echoed = True
            text, hidden = prompt.text, prompt.hidden
            entries += zip(prompt.ids, delta.prompt_logprobs or [None] * len(prompt.ids), strict=True)
        if not self._drops_output:
            text += "".join(p.text for p in delta.pieces if not (p.special and self._body.skip_special_tokens))
            entries += [(entry.token, entry) for entry in delta.logprobs or ()]
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = choice.logprobs.push(entries, hidden=hidden)
        if not self.stream:  # a stream keeps nothing of what it has sent
            choice.text.append(text)
            for name, values in (logprobs or {}).items():
                choice.logprob_lists.setdefault(name, []).extend(values)
        if delta.finish_reason is not None:
            choice.finish_reason = "length" if self._drops_output else delta.finish_reason
            choice.stop_reason = None if self._drops_output else delta.stop_reason
            self._count(index, delta.usage)
        shown = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.dspark_details:
            shown["dspark"] = choice.steps.push(delta)
        return self._head | {"choices": [shown]} | ({"usage": None} if self.include_usage else {})

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk behind the last one, with the usage."""
        return self._head | {"choices": [], "usage": self._usage.as_dict()}

    def result(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": None if self._body.logprobs is None else choice.logprob_lists,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._head | {"choices": choices, "usage": self._usage.as_dict()}

    def _count(self, index: int, usage: Usage | None) -> None:
        assert usage is not None, "the last delta of a request carries its usage"
        if self._drops_output:
            usage = Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        self._usage.add(index // self._body.n, usage)
