"""Text <-> tokens: prompts in the model's chat format, and the model's output as reasoning, content and tool calls.

Owns everything that knows a special token's spelling. Leaves sampling and the end of a request to the engine, HTTP to
the server. Three rooms: ``tokens`` (ids and text), ``render`` (messages to a prompt), ``parse`` (output to events).

A request's life here, with one rule throughout: only a `Piece` marked special is ever a special token, and only the
template makes such pieces::

    prompt = render_chat(messages, tools=tools)           # pure; raises ChatError
    ids = tokenizer.encode_prompt(prompt.pieces)
    detokenizer, stops = StreamingDetokenizer(tokenizer), StopMatcher(stop_strings)
    parser = OutputParser(thinking=prompt.thinking, tools=bool(tools))
    for token in generated:                               # without the end token
        events = parser.push(stops.push(detokenizer.push(token)))
        if stops.matched is not None:                     # ids and usage end with token stops.num_tokens - 1
            break
    else:
        events = parser.push(stops.finish() + detokenizer.finish())
    events = parser.finish()
"""

from flashstep.chat.parse import (
    ContentText,
    Event,
    OutputParser,
    ReasoningText,
    StopMatcher,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from flashstep.chat.render import ChatError, ChatPrompt, render_chat, thinking_budget
from flashstep.chat.tokens import CHAT_TOKENS, Piece, StreamingDetokenizer, Tokenizer, TokenizerError

__all__ = [
    "CHAT_TOKENS",
    "ChatError",
    "ChatPrompt",
    "ContentText",
    "Event",
    "OutputParser",
    "Piece",
    "ReasoningText",
    "StopMatcher",
    "StreamingDetokenizer",
    "Tokenizer",
    "TokenizerError",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "render_chat",
    "thinking_budget",
]
