"""The command line as a user meets it: what it prints where, how it refuses, and how it ends.

Most calls run in this process, because a start costs a second; what only a process can show runs in one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from flashstep import __version__
from flashstep.__main__ import main
from flashstep.chat import Tokenizer
from flashstep.config import ModelConfig
from flashstep.loading import BUNDLED_MODEL
from flashstep.tiny import small_config

PROMPT = "def fibonacci(n):"
COMMAND = [sys.executable, "-m", "flashstep"]


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys) -> Run:
    """Run the command line here: run("generate", "x", "--json")."""

    def call(*args: str) -> Ran:
        try:
            status = main(args)
        except SystemExit as left:  # argparse's own errors
            status = left.code
        return Ran(status, *capsys.readouterr())

    return call


def in_process(*args: str, stdin: bytes = b"", **env: str) -> Ran:
    done = subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, timeout=120, env=os.environ | env)
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def start(*args: str, **streams) -> subprocess.Popen:
    return subprocess.Popen([*COMMAND, *args], stderr=subprocess.PIPE, **{"stdout": subprocess.PIPE} | streams)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


# -- generate ---------------------------------------------------------------------------------------------------------


def test_text_goes_to_one_stream_and_figures_to_the_other(run):
    record = run("generate", PROMPT, "--max-tokens", "24", "--json").json
    ran = run("generate", PROMPT, "--max-tokens", "24")
    assert ran.status == 0
    assert ran.out == record["text"] + "\n"
    for figure in ("24 tokens (length)", "tokens/s", "time to first token", "tokens per step", "accepted drafts by"):
        assert figure in ran.err
    assert "synthetic" not in ran.err.lower()


def test_figures_of_a_run_add_up(run, tokenizer):
    ran = run("generate", PROMPT, "--max-tokens", "40", "--json")
    record, block = ran.json, ModelConfig.from_file(BUNDLED_MODEL).dspark_block_size
    assert (ran.status, ran.err) == (0, "")
    assert record["prompt_tokens"] == 1 + len(tokenizer.encode(PROMPT))
    assert record["completion_tokens"] == len(record["token_ids"]) == 40
    assert record["finish_reason"] == "length"
    assert record["text"] == tokenizer.decode(record["token_ids"])
    assert record["num_speculative_tokens"] == block
    drafted, accepted = record["drafted_per_position"], record["accepted_per_position"]
    assert len(drafted) == len(accepted) == block
    assert all(0 <= a <= d <= record["steps"] for a, d in zip(accepted, drafted, strict=True))
    assert accepted == sorted(accepted, reverse=True), "a draft stands only behind drafts that stood"
    # A step brings its accepted drafts and one token more; the last one may bring more than was asked for.
    assert 0 <= sum(accepted) + record["steps"] - 40 <= block
    assert len(record["step_s"]) == record["steps"] - 1
    steps = record["steps"] - 1  # the first token comes with the prompt
    assert 39 / steps - 1e-6 <= record["tokens_per_step"] <= 1 + sum(accepted) / steps + 1e-6
    assert min(record["step_s"]) > 0
    assert record["time_to_first_token_s"] > 0
    assert record["tokens_per_s"] == pytest.approx(39 / sum(record["step_s"]), rel=0.2)
    assert record["synthetic"] is False
    assert "note" not in record


def test_drafts_change_nothing_but_the_number_of_steps(run):
    common = ("generate", PROMPT, "--max-tokens", "40", "--json")
    plain = run(*common, "--no-speculation").json
    assert plain["steps"] == plain["completion_tokens"] == 40
    assert plain["drafted_per_position"] == []
    steps = [40]
    for drafts in ("0", "2", "5"):
        drafted = run(*common, "--num-speculative-tokens", drafts).json
        assert drafted["token_ids"] == plain["token_ids"]
        steps.append(drafted["steps"])
    assert steps[1] == 40 > steps[2] >= steps[3], "drafts saved no step"


def test_one_token(run):
    ran = run("generate", PROMPT, "--max-tokens", "1")
    assert ran.status == 0
    assert ran.err.startswith("1 token (length), time to first token"), "there is no speed after the first token"
    record = run("generate", PROMPT, "--max-tokens", "1", "--json").json
    assert (len(record["token_ids"]), record["steps"], record["tokens_per_step"]) == (1, 1, 0)


def test_stop_texts(run):
    common = ("generate", PROMPT, "--max-tokens", "40", "--json")
    whole = run(*common).json["text"]
    wanted = whole[7:10]
    before = whole[: whole.index(wanted)]
    for options in (("--stop", wanted), ("--stop", "never written \N{SNOWMAN}", "--stop", wanted)):
        record = run(*common, *options).json
        assert (record["text"], record["finish_reason"]) == (before, "stop")
        assert record["completion_tokens"] == len(record["token_ids"]) <= 40


def test_sampled_text_follows_its_seed(run):
    def sampled(*options: str) -> list[int]:
        return run("generate", PROMPT, "--max-tokens", "32", "--temperature", "1.5", "--json", *options).json[
            "token_ids"
        ]

    assert sampled("--seed", "7") == sampled("--seed", "7") != sampled("--seed", "8")
    assert sampled() != sampled()  # no seed, no promise
    assert sampled("--seed", "7", "--top-k", "1") == sampled("--seed", "8", "--top-k", "1")


def test_logit_bias_bans_and_forces(run):
    common = ("generate", PROMPT, "--max-tokens", "8", "--json")
    first = run(*common).json["token_ids"][0]
    assert first not in run(*common, "--logit-bias", f"{first}=-inf").json["token_ids"]
    assert run(*common, "--logit-bias", "300=1e6", "--logit-bias", "301=-5").json["token_ids"] == [300] * 8


def test_the_end_token_ends_the_text_unless_ignored(run, tokenizer):
    end = ("--logit-bias", f"{tokenizer.eos_id}=1e6")
    record = run("generate", PROMPT, "--json", *end).json
    assert (record["token_ids"], record["text"], record["finish_reason"]) == ([tokenizer.eos_id], "", "stop")
    record = run("generate", PROMPT, "--json", "--ignore-eos", "--max-tokens", "7", *end).json
    assert (record["token_ids"], record["text"], record["finish_reason"]) == ([tokenizer.eos_id] * 7, "", "length")


def test_chat(run, tokenizer):
    common = ("generate", "Write a loop.", "--max-tokens", "12", "--chat")
    plain = run(*common, "--json").json
    assert plain["prompt_tokens"] > 1 + len(tokenizer.encode("Write a loop."))  # the format's own tokens
    assert run(*common).out.strip() == plain["text"].strip()
    with_system = run(*common, "--json", "--system", "Be brief.").json
    assert with_system["prompt_tokens"] > plain["prompt_tokens"]
    for effort in ("high", "30"):
        thinking = run(*common, "--json", "--reasoning-effort", effort).json
        assert thinking["prompt_tokens"] > plain["prompt_tokens"]
        assert (thinking["text"], bool(thinking["reasoning"])) == ("", True), "an answer begins with thinking"


def test_the_context_ends_the_text(run):
    record = run("generate", PROMPT, "--ignore-eos", "--json", "--max-model-len", "40", "--max-tokens", "1000").json
    assert record["finish_reason"] == "length"
    assert record["prompt_tokens"] + record["completion_tokens"] == 40


@pytest.mark.parametrize("prompt", ["\N{SNOWMAN} naïve 漢字 \N{PARTY POPPER}\u202e\0", " ", "\r\n\t", "<think>", "-"])
def test_any_text_can_be_a_prompt(run, monkeypatch, prompt):
    if prompt == "-":
        import io

        monkeypatch.setattr(sys, "stdin", io.StringIO("def from_standard_input"))
    ran = run("generate", "--max-tokens", "4", "--json", "--", prompt)
    assert (ran.status, ran.json["completion_tokens"]) == (0, 4)


def test_standard_input_is_the_same_prompt(run):
    text = f"{PROMPT}\n    return "
    piped = in_process("generate", "-", "--max-tokens", "8", stdin=text.encode())
    assert (piped.status, piped.out) == (0, run("generate", text, "--max-tokens", "8").out)


def test_synthetic_acceptance_is_marked_wherever_it_shows(run):
    common = ("generate", PROMPT, "--max-tokens", "40", "--rejection", "synthetic", "--synthetic-accepted", "3")
    ran = run(*common)
    assert ran.status == 0
    assert "SYNTHETIC ACCEPTANCE" in ran.err
    for line in ran.err.splitlines():
        if "per step" in line or "accepted" in line:
            assert "synthetic" in line.lower(), f"unmarked: {line}"
    record = run(*common, "--json").json
    assert record["synthetic"] is True
    assert record["rejection"] == "synthetic"
    assert "worthless" in record["note"]


# -- refusals ---------------------------------------------------------------------------------------------------------

BAD_CALLS: list[tuple[Sequence[str], str]] = [
    ((), "the following arguments are required: COMMAND"),
    (("generat", "x"), "invalid choice: 'generat'"),
    (("generate",), "the following arguments are required: PROMPT"),
    (("generate", "two", "words"), "unrecognized arguments: words"),
    (("generate", ""), "the prompt is empty"),
    (("generate", "", "--chat"), "the prompt is empty"),
    (("generate", "x\udcff"), "the prompt is not UTF-8 text"),
    (("generate", "x", "--model", ""), "the path is empty"),
    (("generate", "x", "--model", "/no/such/place"), "--model /no/such/place: no such directory"),
    (("generate", "x", "--model", "deepseek-ai/DeepSeek-V4.1-Flash"), "nothing is downloaded"),
    (("generate", "x", "--model", __file__), "no such directory"),
    (("generate", "x", "--max-tokens", "0"), "--max-tokens 0: expected at least 1"),
    (("generate", "x", "--max-tokens", "many"), "argument --max-tokens: invalid int value: 'many'"),
    (("generate", "x", "--stop", ""), "--stop ''"),
    (("generate", "x", "--temperature", "-1"), "temperature: found -1.0, wanted a finite number >= 0"),
    (("generate", "x", "--temperature", "nan"), "temperature: found nan"),
    (("generate", "x", "--top-p", "3"), "top_p: found 3.0, wanted a number in (0, 1]"),
    (("generate", "x", "--top-k", "-1"), "top_k: found -1"),
    (("generate", "x", "--seed", str(2**63)), "seed: found 9223372036854775808, wanted None or a 64-bit"),
    (("generate", "x", "--logit-bias", "42"), "--logit-bias 42: expected TOKEN=BIAS, for example 42=-inf"),
    (("generate", "x", "--logit-bias", "a=1"), "--logit-bias a=1: expected TOKEN=BIAS"),
    (("generate", "x", "--logit-bias", "5=nan"), "logit_bias: found {5: nan}"),
    (("generate", "x", "--logit-bias", "99999999=1"), "logit_bias"),
    (("generate", "x", "--no-speculation", "--num-speculative-tokens", "3"), "exclude each other"),
    (("generate", "x", "--num-speculative-tokens", "9"), "expected 0..5"),
    (("generate", "x", "--num-speculative-tokens", "-1"), "expected 0..5"),
    (("generate", "x", "--rejection", "synthetic"), "--synthetic-accepted N go together"),
    (("generate", "x", "--synthetic-accepted", "2"), "--synthetic-accepted N go together"),
    (("generate", "x", "--rejection", "synthetic", "--synthetic-accepted", "9"), "found 9.0"),
    (("generate", "x", "--rejection", "none"), "invalid choice: 'none'"),
    (("generate", "x", "--system", "Be brief."), "need --chat"),
    (("generate", "x", "--reasoning-effort", "high"), "need --chat"),
    (("generate", "x", "--chat", "--reasoning-effort", "silly"), "--reasoning-effort: 'silly' is not an effort"),
    (("generate", "x", "--chat", "--reasoning-effort", "500"), "500 is not an effort; wanted one of none, low"),
    (("generate", "x", "--threads", "0"), "--threads 0: expected 1.."),
    (("generate", "x", "--threads", "99999999999"), "--threads 99999999999: expected 1.."),
    (("generate", "x", "--device", "no such device"), "--device no such device: "),
    (("generate", "x", "--device", "cuda:99"), "`flashstep doctor` says what this machine has"),
    (("generate", "x", "--decode-backend", "fast"), "invalid choice: 'fast'"),
    (("generate", "x", "--max-model-len", "1"), "max_model_len = 1: expected "),
    (("generate", "x", "--max-model-len", "999999999"), "max_model_len = 999999999: expected "),
    (("generate", "some words " * 20, "--max-model-len", "16"), "max_model_len"),
    (("info", ""), "the path is empty"),
    (("info", "/no/such/place"), "/no/such/place: "),
    (("info", __file__), "not valid JSON"),
    (("info", "--world", "3"), "tensor parallelism over 3 ranks"),
    (("info", "--world", "0"), "expected at least one rank"),
    (("doctor", "--colour"), "unrecognized arguments: --colour"),
    (("verify",), "the following arguments are required: DIR"),
    (("verify", "/no/such/place"), "no such directory: give one in the golden format"),
    (("verify", str(BUNDLED_MODEL)), "expected index.json beside unit files, or config.json beside vectors/"),
    (("verify", str(BUNDLED_MODEL), "--backend", "abacus"), "abacus"),
]


@pytest.mark.parametrize(("args", "message"), BAD_CALLS, ids=[" ".join(args)[:60] for args, _ in BAD_CALLS])
def test_a_bad_call_is_refused_with_a_reason(run, args, message):
    ran = run(*args)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("error:") == 1
    assert "Traceback" not in ran.err


def test_all_bad_options_are_named_in_one_error(run):
    options = "--temperature -1 --top-p 3 --logit-bias 42 --logit-bias x=y --threads 0 --max-tokens 0 --no-speculation"
    conflicts = "--num-speculative-tokens 3 --model /nope --rejection synthetic --system hello --device nonsense"
    ran = run("generate", "x", *options.split(), *conflicts.split(), "--stop", "")
    assert ran.status == 2
    for name in ("temperature:", "top_p:", "-bias 42:", "-bias x=y:", "--threads", "--max-tokens", "--no-speculation"):
        assert name in ran.err
    for name in ("--num-speculative-tokens", "/nope", "--synthetic-accepted", "--chat", "--device", "--stop"):
        assert name in ran.err


@pytest.mark.parametrize("content", [b"", b"\x93\xff\x00binary", b"[1, 2]", b'{"model_type": "llama"}', b"{}"])
def test_a_directory_that_is_no_model_is_named(run, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    for args in (("generate", "x", "--model", str(tmp_path)), ("info", str(tmp_path))):
        ran = run(*args)
        assert (ran.status, ran.out) == (2, "")
        assert str(tmp_path / "config.json") in ran.err


def test_a_configuration_without_weights_cannot_generate(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    ran = run("generate", "x", "--model", str(tmp_path))
    assert (ran.status, ran.out) == (2, "")
    assert "holds no weights; download the checkpoint" in ran.err


def test_input_that_is_no_text_is_refused():
    for mode in ("strict", "surrogateescape"):
        ran = in_process("generate", "-", stdin=b"\xff\xfe\x00", PYTHONIOENCODING=f"utf-8:{mode}")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("flashstep: error: the prompt is not UTF-8 text")


# -- info, doctor, help -----------------------------------------------------------------------------------------------


def test_info_of_the_bundled_model(run):
    ran = run("info")
    assert (ran.status, ran.err) == (0, "")
    for words in ("complete", "KV source", "Memory of a rank", "Bytes that a rank reads in a step", "floor"):
        assert words in ran.out
    record = run("info", "--json").json
    assert record["checkpoint"] == str(BUNDLED_MODEL)
    assert record["config"]["dspark_block_size"] == 5
    assert record["step_bytes"] == pytest.approx(sum(stage["nbytes"] for stage in record["stages"]))
    assert run("info", str(BUNDLED_MODEL), "--world", "2", "--json").json["step_world"] == 2


def test_info_of_a_bare_configuration(run, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small_config(num_attention_heads=4)))
    for path in (file, tmp_path):
        ran = run("info", str(path))
        assert ran.status == 0
        assert "configuration alone, no weights beside it" in ran.out
        record = run("info", str(path), "--json").json
        assert (record["checkpoint"], record["config"]["num_attention_heads"]) == (None, 4)


def test_doctor_claims_what_it_can_keep(run):
    ran = run("doctor", "--json")
    record = ran.json
    assert (ran.status, ran.err) == (0, "")
    assert "reference" in record["usable"]
    assert [b["name"] for b in record["backends"] if all(r["met"] for r in b["requirements"])] == record["usable"]
    for backend in record["backends"]:
        assert backend["requirements"]
        for requirement in backend["requirements"]:
            assert requirement["phrase"]
            assert requirement["found"]
            assert len(requirement["way_out"]) > 10, f"no way out of {requirement['phrase']}"
    for backend in record["backends"]:
        asked = run("generate", "x", "--max-tokens", "1", "--decode-backend", backend["name"])
        assert asked.status == (0 if backend["name"] in record["usable"] else 2), backend["name"]


def test_doctor_says_every_miss_and_its_way_out(run):
    record, said = run("doctor", "--json").json, run("doctor")
    assert said.status == 0
    for backend in record["backends"]:
        verdict = "yes" if backend["name"] in record["usable"] else "no"
        assert f"{backend['name']} ({backend['role']}): {verdict}" in said.out
        for requirement in backend["requirements"]:
            assert f"{requirement['phrase']}: {requirement['found']}" in said.out
            assert requirement["met"] or f"-> {requirement['way_out']}" in said.out
    assert f"auto takes: {record['usable'][-1]}" in said.out


def test_help_and_usage_errors_answer_without_loading_torch():
    calls = [["--help"], ["--version"], [], ["nonsense"], ["generate"], ["generate", "--max-tokens", "x", "y"]]
    calls += [[command, "--help"] for command in ("generate", "info", "doctor", "verify")]
    program = (
        "import sys, json\n"
        "from flashstep.__main__ import main\n"
        "for call in json.loads(sys.argv[1]):\n"
        "    try: main(call)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'rich'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    command = [sys.executable, "-c", program, json.dumps(calls)]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 3
    assert f"flashstep {__version__}" in done.stdout
    assert all(word in done.stdout for word in ("generate", "doctor", "--num-speculative-tokens", "TOKEN=BIAS"))


# -- a process's end --------------------------------------------------------------------------------------------------


def test_first_text_comes_soon():
    started = time.perf_counter()
    with start("generate", PROMPT, "--max-tokens", "64", "--ignore-eos") as process:
        assert process.stdout.read(1)
        elapsed = time.perf_counter() - started
        process.kill()
    assert elapsed < 8  # 2 s on an idle core


def test_an_interrupt_ends_it_quietly():
    with start("generate", PROMPT, "--max-tokens", "10000", "--ignore-eos") as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.decode() == "\ninterrupted\n"


def test_a_reader_that_leaves_ends_it_quietly():
    with start("generate", PROMPT, "--max-tokens", "10000", "--ignore-eos") as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("args", [["info"], ["info", "--json"], ["doctor"], ["generate", PROMPT, "--json"]])
def test_nobody_reads_the_output(args):
    reader, writer = os.pipe()
    os.close(reader)
    with start(*args, stdout=writer) as process:
        os.close(writer)
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device without room")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written_is_an_error(options):
    with open("/dev/full", "wb") as full, start("generate", PROMPT, "--max-tokens", "2", *options, stdout=full) as ran:
        assert ran.wait(timeout=60) == 2
        assert ran.stderr.read().startswith(b"flashstep: error: [Errno 28]")


def test_characters_that_the_terminal_lacks_are_escaped(tokenizer):
    stray = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\x80")
    options = ("--max-tokens", "2", "--logit-bias", f"{stray}=1e6")
    ran = in_process("generate", PROMPT, *options, PYTHONIOENCODING="ascii")
    assert (ran.status, ran.out) == (0, "\\ufffd\\ufffd\n")
    assert "Traceback" not in in_process("info", "/n\u00f6pe", PYTHONIOENCODING="ascii").err
