"""The Engram's compressed vocabulary: which token ids count as the same word (section 9 of `docs/model.md`).

Owns the map from token ids to compressed ids, computed from the tokenizer alone. Hashing and the tables are
elsewhere; `engram_compressed_vocab_size` of the configuration is the number of distinct ids here.
"""

from __future__ import annotations

import re

import numpy as np
from tokenizers import Tokenizer, normalizers

_REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no complete character
_BLANKS = re.compile(r"[ \t\r\n]+")
# The tokenizer library's own steps rather than `unicodedata` and `str.strip`: they differ on the separators
# U+001C..U+001F, and a map that followed the Unicode version of the running Python would move with it.
_FOLD = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
)
_STRIP = normalizers.Strip()


def compressed_token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Compressed id of every token id: [vocab] int32, numbered by first appearance over ids 0, 1, 2, ..."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    compressed = np.empty(size, dtype=np.int32)
    for token, text in enumerate(texts):
        # Part of a character has no text of its own, so its piece stands for it.
        key = tokenizer.id_to_token(token) if _REPLACEMENT in text else _folded(text)
        compressed[token] = numbers.setdefault(key or text, len(numbers))
    return compressed


def _folded(text: str) -> str:
    """NFKC, NFD, accents stripped, lower case, blanks collapsed, stripped; one space alone stays one space."""
    text = _BLANKS.sub(" ", _FOLD.normalize_str(text))
    return text if text == " " else _STRIP.normalize_str(text)
