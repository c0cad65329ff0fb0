"""Text of the tiny model: the standard library's sources, their tokenizer, held-out files and prompts.

Owns which files are read, which are held out (by a hash of their path), the byte-level BPE trained on the rest, and
the token streams. Python's standard library is under the PSF licence; nothing else goes in.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VERSION = 1  # of the rules below; raise it when they change what the corpus holds
HELD_OUT_PERCENT = 4
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜noise｜>",
)
# As in the released tokenizer, what belongs to the text a model writes is not skipped when decoding.
_WRITTEN_TOKENS = ("<think>", "</think>", "｜DSML｜")
BOS, EOS, PAD = 0, 1, 2
NOISE = SPECIAL_TOKENS.index("<｜noise｜>")

# A line end with the indentation after it, one digit, a word with the space or underscores before it, underscores,
# a run of signs with the space before it, blanks, anything else that is blank: every character matches one of them.
_PIECES = r"(?:\r?\n)+[ \t]*|\d| ?_*[^\W\d_]+|_+| ?[^\s\w]+|[ \t]+|\s|\w"

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "encodings", "pydoc_data", "data", "lib-dynload"}
_LARGEST_FILE_BYTES = 300_000
_LEAST_PROSE = 0.6  # files with fewer letters and blanks than this are tables, not code


@dataclass(frozen=True)
class Document:
    """One source file: its path below the library's folder, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training; the path alone decides, whatever the library's version."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite."""
        return self.path.startswith("test/") or "/test/" in self.path or "_test/" in self.path


@dataclass(frozen=True)
class Corpus:
    """All documents in path order, with what identifies them."""

    documents: tuple[Document, ...]

    @property
    def training(self) -> list[Document]:
        """Documents to train on."""
        return [document for document in self.documents if not document.held_out]

    @property
    def held_out(self) -> list[Document]:
        """Documents to evaluate on."""
        return [document for document in self.documents if document.held_out]

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(len(document.text.encode()) for document in self.documents)

    @property
    def sha256(self) -> str:
        """Hash of all paths and texts."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.path}\0{document.text}\0".encode())
        return digest.hexdigest()


def read_corpus(folder: Path | None = None, largest_bytes: int | None = None) -> Corpus:
    """The .py files below `folder` (default: the running Python's library), at most about `largest_bytes` of them."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    documents, total = [], 0
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        if _SKIPPED_FOLDERS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        raw = path.read_bytes()
        if not 200 <= len(raw) <= _LARGEST_FILE_BYTES:
            continue
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue  # deliberately broken test files
        if sum(character.isalpha() or character.isspace() for character in text) < _LEAST_PROSE * len(text):
            continue
        documents.append(Document(relative.as_posix(), text))
        total += len(raw)
        if largest_bytes and total > largest_bytes:
            break
    corpus = Corpus(tuple(documents))
    if not corpus.training or not corpus.held_out:
        raise SystemExit(
            f"{folder}: {len(corpus.training)} Python sources to train on and {len(corpus.held_out)} held out, "
            "but both are needed; name a standard library's folder with --corpus"
        )
    return corpus


# -- tokenizer ------------------------------------------------------------------------------------------------------


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with `vocab_size` tokens in all, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] not in _WRITTEN_TOKENS
    return Tokenizer.from_str(json.dumps(raw, ensure_ascii=False))


def tokenizer_config(context_tokens: int) -> dict[str, object]:
    """`tokenizer_config.json` of the checkpoint."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "model_max_length": context_tokens,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }


# -- token streams --------------------------------------------------------------------------------------------------


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in order, each between a begin and an end token: [tokens] int32."""
    once = list(dict.fromkeys(texts))
    encodings = tokenizer.encode_batch_fast(once, add_special_tokens=False)
    parts = {
        text: np.array([BOS, *encoding.ids, EOS], dtype=np.int32)
        for text, encoding in zip(once, encodings, strict=True)
    }
    return np.concatenate([parts[text] for text in texts])


def training_texts(documents: list[Document], seed: int = 0) -> list[str]:
    """Texts of one pass, in a fixed random order: library files twice, tests and question-answer pairs once."""
    texts = [document.text for document in documents for _ in range(1 if document.is_test else 2)]
    texts += [text for document in documents for text in chat_texts(document)]
    order = np.random.default_rng(seed).permutation(len(texts))
    return [texts[i] for i in order]


def chat_texts(document: Document) -> list[str]:
    """Question-answer pairs of a file: the docstring of a short top-level function or method asks for its source."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return []
    lines = document.text.splitlines()
    pairs = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or node.decorator_list:
            continue
        docstring = ast.get_docstring(node)
        source = lines[node.lineno - 1 : node.end_lineno]
        if not docstring or not 4 <= len(source) <= 40:
            continue
        source = [line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in source]
        asked = docstring.split("\n\n")[0].strip()
        if len(asked) > 400:
            continue
        question = f"Write a Python function `{node.name}`. {asked}"
        pairs.append(f"<｜User｜>{question}<｜Assistant｜></think>" + "\n".join(source))
    return pairs


# -- held-out prompts -----------------------------------------------------------------------------------------------


def held_out_prompts(
    documents: list[Document], tokenizer: Tokenizer, wanted: int = 200, shortest: int = 30, longest: int = 200
) -> list[dict[str, object]]:
    """`wanted` beginnings of top-level definitions, whole lines of `shortest`..`longest` tokens, round robin by file.

    The last line end is left off: with the indentation that follows, it is one token, which the model has to write.
    """
    queues = [queue for document in documents if (queue := _cuts(document, tokenizer, shortest, longest))]
    prompts: list[dict[str, object]] = []
    while queues and len(prompts) < wanted:
        prompts += [queue.pop(0) for queue in queues][: wanted - len(prompts)]
        queues = [queue for queue in queues if queue]
    return prompts


def _cuts(document: Document, tokenizer: Tokenizer, shortest: int, longest: int) -> list[dict[str, object]]:
    lines = document.text.splitlines(keepends=True)
    cuts = []
    for start, line in enumerate(lines):
        if not line.startswith(("def ", "class ")):
            continue
        seed = hashlib.sha256(f"{document.path}:{start}".encode()).digest()
        target = shortest + int.from_bytes(seed[:4], "big") % (longest - shortest)
        text = ""
        for end in range(start, len(lines)):
            longer = "".join(lines[start : end + 1]).rstrip("\n")
            if len(tokenizer.encode(longer).ids) > target:
                break
            text = longer
        text = text.rstrip()
        num_tokens = len(tokenizer.encode(text).ids)
        if shortest <= num_tokens <= longest:
            cuts.append({"file": document.path, "line": start + 1, "tokens": num_tokens, "text": text})
    return sorted(cuts, key=lambda cut: hashlib.sha256(str(cut["line"]).encode()).digest())
