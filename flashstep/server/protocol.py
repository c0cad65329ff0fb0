"""What the bodies of requests may hold: OpenAI's names, and vLLM's where OpenAI has none.

Fields that we do not know are ignored, as OpenAI's clients expect, and so is null. Those that would change the answer
and that we cannot honour are refused by name (`refused`): silence would be a wrong answer.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flashstep.params import SamplingParams
from flashstep.server.errors import bad_request

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
_INT64 = 1 << 64


class Body(BaseModel):
    """A JSON object: no coercion between types, null means absent."""

    model_config = ConfigDict(extra="ignore", strict=True)
    refused: ClassVar[dict[str, str]] = {}  # field -> what to do instead

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, instead in cls.refused.items():
            if given.get(name):
                raise bad_request(name, f"not supported; {instead}", code="unsupported_parameter")
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Body):
    """`include_usage` adds an event with the usage."""

    include_usage: bool = False


class JsonSchema(Body):
    """A schema as `response_format` carries it; it is always enforced, whatever `strict` says."""

    name: str = "response"
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """`text`, `json_object` (any object) or `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise bad_request("response_format.json_schema", "missing; it goes with the type json_schema")
        return self


class StructuredOutputs(Body):
    """vLLM's name for constraints on an answer; one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False


class Sampling(Body):
    """What both kinds of completion share."""

    refused: ClassVar[dict[str, str]] = {
        "logits_processors": "use logit_bias",
        "use_beam_search": "use n",
        "truncate_prompt_tokens": "shorten the prompt before sending it",
        "include_stop_str_in_output": "append stop_reason yourself",
        "bad_words": "use logit_bias",
        "allowed_token_ids": "use logit_bias",
        "prompt_logprobs": "use echo with logprobs on /v1/completions",
        "prompt_embeds": "send text or token ids",
        "guided_json": "use structured_outputs.json or response_format",
        "guided_regex": "use structured_outputs.regex",
        "guided_choice": "use structured_outputs.choice",
        "guided_grammar": "use structured_outputs.grammar",
    }

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    dspark_details: bool = False  # ours: a stream's choices say which of a step's tokens were drafts

    def stops(self) -> tuple[str, ...]:
        """Stop strings, one or several."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > MAX_STOPS:
            raise bad_request("stop", f"{len(stops)} stop strings found, wanted at most {MAX_STOPS}")
        if "" in stops:
            raise bad_request("stop", "an empty string is no stop string; leave it out")
        return stops

    def sampling_params(self, choice: int, banned: tuple[int, ...] = ()) -> SamplingParams:
        """Parameters of one of n choices, of which each has a seed of its own: `seed` plus its index."""
        seed = self.seed
        if seed is not None and choice:
            seed = (seed + choice + _INT64 // 2) % _INT64 - _INT64 // 2
        bias = {_token_id(key): value for key, value in self.logit_bias.items()}
        return SamplingParams.from_fields(
            {
                "temperature": self.temperature,
                "top_k": max(self.top_k, 0),
                "top_p": self.top_p,
                "min_p": self.min_p,
                "seed": seed,
                "repetition_penalty": self.repetition_penalty,
                "presence_penalty": self.presence_penalty,
                "frequency_penalty": self.frequency_penalty,
                "logit_bias": bias | dict.fromkeys(banned, float("-inf")),
            }
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > 9:
        raise bad_request("logit_bias", f"key {key!r} found, wanted a token id")
    return int(key)


class CompletionBody(Sampling):
    """POST /v1/completions."""

    refused: ClassVar[dict[str, str]] = Sampling.refused | {"suffix": "this model continues text, it does not fill in"}

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    add_special_tokens: bool = True  # whether a text prompt gets the begin token in front
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise bad_request("best_of", "not supported unless it equals n", code="unsupported_parameter")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens", "0 found, wanted at least 1 (0 goes with echo only)")
        return self


class FunctionChoice(Body):
    """The function that a named choice asks for."""

    name: str


class NamedToolChoice(Body):
    """`{"type": "function", "function": {"name": ...}}`."""

    type: Literal["function"]
    function: FunctionChoice


class TemplateArguments(Body):
    """`chat_template_kwargs`, of which the model's format knows two."""

    thinking: bool | None = None
    reasoning_effort: str | int | None = None


class Thinking(Body):
    """DeepSeek's own switch."""

    type: Literal["enabled", "disabled"]


class ChatInput(Body):
    """What a prompt is rendered from; shared by /v1/chat/completions and /tokenize."""

    # OpenAI's clients know efforts that this model does not; they are read as their nearest neighbours.
    neighbours: ClassVar[dict[str, str]] = {"minimal": "low", "medium": "high"}

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    reasoning_effort: str | int | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateArguments = TemplateArguments()

    def effort(self) -> str | int | None:
        """The effort asked for, in the model's words."""
        effort = self.reasoning_effort
        if effort is None:
            effort = self.chat_template_kwargs.reasoning_effort
        return self.neighbours.get(effort, effort) if isinstance(effort, str) else effort

    def thinks(self) -> bool:
        """Whether thinking is on; it is unless switched off."""
        if self.chat_template_kwargs.thinking is not None:
            return self.chat_template_kwargs.thinking
        return self.thinking is None or self.thinking.type == "enabled"


class ChatBody(Sampling, ChatInput):
    """POST /v1/chat/completions."""

    refused: ClassVar[dict[str, str]] = Sampling.refused | {
        "audio": "this model writes text",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "web_search_options": "declare a tool",
        "continue_final_message": "use /v1/completions with the text to continue",
        "chat_template": "the model's own format is always used",
        "documents": "put them in a message",
    }

    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice = "auto"
    parallel_tool_calls: bool = True
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    modalities: list[str] = ["text"]

    @model_validator(mode="after")
    def _possible(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs", "needs logprobs: true")
        if self.modalities != ["text"]:
            raise bad_request("modalities", 'this model writes text: wanted ["text"]', code="unsupported_parameter")
        if self.tool_choice not in ("auto", "none") and not self.tools:
            raise bad_request("tool_choice", "a call is asked for, but tools is empty")
        return self


class TokenizeBody(Body):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatInput):
    """POST /tokenize with messages."""

    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]
