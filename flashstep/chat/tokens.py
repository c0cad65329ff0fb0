"""The tokenizer file, the special tokens' names, and ids back to text as they arrive.

Owns the spelling of every special token and the rule that text never becomes one: a tokenizer loaded here has no
added tokens left in its text path, so ``encode`` cannot be talked into producing them. Which pieces of a prompt are
special is decided by ``render``; what special pieces of an output mean, by ``parse``.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

CHAT_TOKENS = (BEGIN, END, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML)
"""The special tokens that the chat format needs; plain completion needs the first two only."""


class TokenizerError(ValueError):
    """A tokenizer file that is missing, unreadable or lacks what was asked of it; the text names the file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of prompt or output: ordinary text, or the spelling of exactly one special token."""

    text: str
    special: bool = False


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet, character -> byte: printable Latin-1 stands for itself, the rest follows from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A byte-level BPE ``tokenizer.json``: text to ids, ids to text, special tokens by name.

    ``specials`` maps the spelling of every added token to its id; ``vocab_size`` is one more than the highest id.
    Loading needs the begin and end tokens only; the other ``CHAT_TOKENS`` are asked for when a prompt uses them.
    """

    def __init__(self, tokenizer_json: str, origin: str) -> None:
        """Build from the text of a ``tokenizer.json``; ``origin`` is what errors call it. Raises TokenizerError."""
        self._origin = origin
        try:
            spec: dict[str, Any] = json.loads(tokenizer_json)
            model, decoder = spec["model"], spec.get("decoder") or {}
            kinds = model["type"], decoder.get("type")
            added = {str(token["content"]): int(token["id"]) for token in spec["added_tokens"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(
                f"{origin}: not a tokenizer file ({error!r}); it should be the tokenizer.json of the checkpoint, "
                "so download it again"
            ) from error
        if kinds != ("BPE", "ByteLevel"):
            raise TokenizerError(
                f"{origin}: model and decoder are {kinds}, wanted ('BPE', 'ByteLevel'); "
                "use the tokenizer.json that came with the checkpoint"
            )
        self.specials: dict[str, int] = added
        self._special_of = {token_id: name for name, token_id in added.items()}
        # Without added tokens the text path has no way to a special id, whatever a user types. The library's own
        # switch (encode_special_tokens) covers tokens flagged special only, and the release flags <think>,
        # </think>, <｜User｜> and ｜DSML｜ as ordinary ones. Truncation and padding would alter prompts silently.
        text_path: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        try:
            self._bpe = BpeTokenizer.from_str(json.dumps(spec | text_path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{origin}: the tokenizers library cannot load it: {error}") from error
        by_id = {token_id: piece for piece, token_id in model["vocab"].items()} | self._special_of
        self.vocab_size = max(by_id) + 1
        self._pieces = [by_id.get(token_id) for token_id in range(self.vocab_size)]
        self.bos_id = self.special_id(BEGIN)
        self.eos_id = self.special_id(END)
        reachable = [name for name, token_id in added.items() if token_id in self.encode(name)]
        if reachable:
            raise TokenizerError(
                f"{origin}: user text could become special tokens: {reachable[:5]} are also ordinary vocabulary; "
                "use the tokenizer.json that came with the checkpoint"
            )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load ``tokenizer.json`` from a model directory. Raises TokenizerError that names the file."""
        file = path / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(
                f"{file}: cannot be read ({error}); the model directory should hold the checkpoint's "
                "tokenizer.json, so check the path or finish the download"
            ) from error
        return cls(text, str(file))

    def special_id(self, name: str) -> int:
        """Id of a special token by its spelling. Raises TokenizerError where the tokenizer has none."""
        try:
            return self.specials[name]
        except KeyError:
            raise TokenizerError(self._lacking([name])) from None

    def missing_chat_tokens(self) -> list[str]:
        """The ``CHAT_TOKENS`` that this tokenizer lacks; chat works where the list is empty."""
        return [name for name in CHAT_TOKENS if name not in self.specials]

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. Never a special id: a spelled-out ``</think>`` is just characters.

        Raises ValueError for unpaired surrogates, which no UTF-8 text holds.
        """
        try:
            text.encode()  # the library would call such text no string at all
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text holds an unpaired surrogate at character {error.start}; send complete characters"
            ) from error
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of a rendered prompt. Raises TokenizerError, naming all missing chat tokens, before encoding anything.

        Neighbouring text pieces are encoded as one string: byte pairs merge across the border between template and
        content, as they do when the whole prompt is one string.
        """
        pieces = list(pieces)
        unknown = {piece.text for piece in pieces if piece.special and piece.text not in self.specials}
        if unknown:
            raise TokenizerError(self._lacking([*self.missing_chat_tokens(), *(unknown - set(CHAT_TOKENS))]))
        ids: list[int] = []
        for special, run in groupby(pieces, key=lambda piece: piece.special):
            if special:
                ids.extend(self.specials[piece.text] for piece in run)
            else:
                ids.extend(self.encode("".join(piece.text for piece in run)))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD. Raises ValueError."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a token may end inside a character. Raises ValueError for an unknown id."""
        piece = self.token_piece(token_id)
        if token_id in self._special_of:
            return piece.encode()
        try:
            return bytes(_BYTE_OF[char] for char in piece)
        except KeyError:  # a piece outside the byte alphabet stands for itself, as in the library
            return piece.encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own: ``decode([token_id])``."""
        return self.decode([token_id])

    def token_piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it: bytes in the byte-level alphabet, special tokens as they are."""
        piece = self._pieces[token_id] if 0 <= token_id < self.vocab_size else None
        if piece is None:
            raise ValueError(f"token id {token_id} is not in {self._origin}, whose ids go up to {self.vocab_size - 1}")
        return piece

    def special_name(self, token_id: int) -> str | None:
        """Spelling of a special token, None for an ordinary one."""
        return self._special_of.get(token_id)

    def _lacking(self, names: Sequence[str]) -> str:
        return (
            f"{self._origin}: special tokens missing: {', '.join(names)}; the chat format of DeepSeek-V4.1 needs them: "
            "use that release's tokenizer.json, or plain completion, which needs the begin and end tokens only"
        )


class StreamingDetokenizer:
    """Ids in, pieces out, one token at a time and at the cost of that token.

    Text comes out in whole characters: the bytes of an unfinished one wait for the next token. A special token is a
    piece of its own, so whoever reads the pieces knows it from text that merely looks like it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> list[Piece]:
        """Pieces that this token completes: none, text, a special token, or an unfinished character and a special."""
        special = self._tokenizer.special_name(token_id)
        if special is None:
            return list(_text_piece(self._utf8.decode(self._tokenizer.token_bytes(token_id))))
        return [*self.finish(), Piece(special, special=True)]

    def finish(self) -> list[Piece]:
        """The unfinished character, if any, as U+FFFD: the same text as decoding all ids at once."""
        return list(_text_piece(self._utf8.decode(b"", final=True)))


def _text_piece(text: str) -> Iterator[Piece]:
    if text:
        yield Piece(text)
