"""Tensor parallelism: the same text over any number of ranks, and one message and no process left when a rank fails.

Ranks are real processes, so each launch costs a few seconds; tests that can share one do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from flashstep.__main__ import main
from flashstep.checkpoint import Checkpoint
from flashstep.doctor import Requirement
from flashstep.engine import Engine
from flashstep.loading import BUNDLED_MODEL, CheckpointReader, load
from flashstep.params import SamplingParams
from flashstep.ranks import AgreementError, Faults, RankFailure
from flashstep.ranks.agreement import Report, compare, room, weights_digest
from flashstep.ranks.launch import Ranks
from flashstep.ranks.pulse import Loss, Pulse
from flashstep.requests import GenerationRequest
from flashstep.settings import EngineConfig
from flashstep.shards import read_headers

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=512, page_tokens=16, kv_cache_memory=1 << 26)
TEXTS = (
    "def fibonacci(n):",
    "import os\n\nclass Reader:\n    def read(self, path):\n",
    "for i in range(10):\n    print(",
)
NOTICED_S = 10  # how soon a failure is promised to be told
COMMAND = [sys.executable, "-m", "flashstep"]


def write(engine: Engine, text: str, count: int, **params: float) -> list[int]:
    """`count` tokens behind `text`."""
    tokenizer = engine.loaded.tokenizer
    request = GenerationRequest(
        prompt=(tokenizer.bos_id, *tokenizer.encode(text)),
        params=SamplingParams.from_fields({"temperature": 0.0, **params}),
        max_tokens=count,
        ignore_eos=True,
    )
    tokens: list[int] = []
    for delta in engine.run(request):
        assert delta.error is None
        tokens += delta.tokens
    return tokens


def write_on(engine: Engine) -> None:
    """Write for a long time."""
    for _ in range(1000):
        write(engine, TEXTS[0], 100)


def write_everything(engine: Engine) -> list[list[int]]:
    """Greedy and sampled texts, the first one twice: its second run starts behind pages from the prefix cache."""
    texts = [write(engine, text, 24) for text in TEXTS]
    texts += [write(engine, text, 24, temperature=1.0, top_p=0.95, seed=7) for text in TEXTS[:2]]
    hits = engine.stats().cache_hits
    # Behind pages that another request computed.
    texts.append(write(engine, TEXTS[1] + engine.loaded.tokenizer.decode(texts[1][:16]), 16))
    assert engine.stats().cache_hits == hits + 1, "nothing was taken from the prefix cache"
    return texts


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def wait_until(holds: Callable[[], object], what: str, seconds: float = NOTICED_S) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"did not happen within {seconds} s: {what}"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = {process.pid for process in children()}
    yield
    wait_until(lambda: {process.pid for process in children()} <= before, "every process has ended", 3)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What one rank writes."""
    return write_everything(Engine(load(), CONFIG))


# -- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_writes_the_same_and_stays_equal(alone, world):
    with Ranks(BUNDLED_MODEL, world, check=True, silence_s=20) as ranks:
        engine = ranks.engine(CONFIG)
        assert write_everything(engine) == alone
        assert ranks.progress.step > 40
        assert ranks.failure is None
        processes = [psutil.Process(pid) for pid in ranks.pids[1:]]
        assert len(processes) == world - 1
    assert not any(process.is_running() for process in processes)
    with pytest.raises(RankFailure, match="closed"):
        write(engine, TEXTS[0], 1)


@pytest.mark.slow
def test_ranks_stay_equal_over_a_thousand_steps():
    with Ranks(BUNDLED_MODEL, 2, check=True, silence_s=20) as ranks:
        engine = ranks.engine(CONFIG)
        for seed in itertools.count():
            write(engine, TEXTS[seed % len(TEXTS)], 400, temperature=1.0, seed=seed)
            if ranks.progress.step > 1000:
                break
        assert ranks.failure is None


def test_requests_that_wait_for_each_others_pages_write_what_they_write_on_one_rank():
    config = replace(CONFIG, max_num_seqs=3, max_model_len=None, max_num_batched_tokens=64, kv_cache_memory=1_064_000)

    def write_at_once(engine: Engine) -> list[list[int]]:
        assert engine.state.pool.num_pages < 12
        texts: list[list[int]] = [[] for _ in range(4)]
        params = SamplingParams.from_fields({"temperature": 0.0})
        for number, tokens in enumerate(texts):
            prompt = tuple(range(20 + 7 * number, 44 + 7 * number))
            engine.submit(
                GenerationRequest(prompt=prompt, params=params, max_tokens=40, ignore_eos=True),
                lambda delta, tokens=tokens: tokens.extend(delta.tokens),
            )
        while engine.busy:
            engine.step()
        assert engine.stats().preemptions > 0
        assert all(len(tokens) == 40 for tokens in texts)
        return texts

    wanted = write_at_once(Engine(load(), config))
    with Ranks(BUNDLED_MODEL, 2, check=True, silence_s=20) as ranks:
        assert write_at_once(ranks.engine(config)) == wanted


@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_an_engram_table_are_the_columns_of_the_whole(world):
    checkpoint = Checkpoint.open(BUNDLED_MODEL)
    config = checkpoint.config
    for index, layer in enumerate(config.engram_layer_ids):
        draws = torch.Generator().manual_seed(layer)
        columns, start = [], 0
        for prime in (prime for heads in config.engram_primes[index] for prime in heads):
            columns.append(torch.randint(0, prime, (5,), generator=draws) + start)
            start += prime
        rows = torch.stack(columns, dim=-1)
        whole = CheckpointReader(checkpoint, "cpu").engram_gather(layer)(rows)
        heads = whole.unflatten(1, (-1, config.engram_n_heads))  # [rows, sizes, heads, head_dim]
        for rank, wanted in enumerate(heads.chunk(world, dim=2)):
            for place in ("mapped", "device"):
                reader = CheckpointReader(checkpoint, "cpu", place, rank=rank, world=world)
                found = reader.engram_gather(layer)(rows)
                torch.testing.assert_close(found, wanted.flatten(1, 2), rtol=0, atol=0)


# -- starting together ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with one value changed."""
    path = Path(shutil.copytree(BUNDLED_MODEL, tmp_path_factory.mktemp("other") / "model"))
    entry = read_headers(path)[0]["layers.3.attn_norm.weight"]
    with (path / entry.shard).open("r+b") as file:
        file.seek((entry.begin + entry.end) // 2)
        value = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value[0] ^ 1]))
    return path


def test_ranks_that_cannot_work_together_all_fail_with_the_same_message(other_weights, capfd):
    faults = Faults(weights={1: other_weights}, missing={1: "the gloo collectives"})
    with Ranks(BUNDLED_MODEL, 2, faults=faults) as ranks, pytest.raises(AgreementError) as caught:
        ranks.load()
    message = str(caught.value)
    assert message.startswith("tensor parallelism over 2 ranks cannot start: 2 problems:")
    assert "rank 1: the gloo collectives: taken away by a test; install a build of torch" in message
    digests = weights_digest(other_weights), weights_digest(BUNDLED_MODEL)
    assert (
        f"rank 1: headers and sampled bytes of the weights: {digests[0]}, but rank 0 has {digests[1]}; all ranks need "
        "the same"
    ) in message
    assert f"flashstep: rank 1: {message}" in capfd.readouterr().err


def test_a_rank_whose_part_cannot_be_read_is_named(tmp_path, capfd):
    path = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    entry = read_headers(path)[0]["layers.0.ffn.shared_experts.w1.weight"]
    with (path / entry.shard).open("r+b") as file:
        file.seek(entry.end - 1)  # the last row: rank 1's
        file.write(b"\x7f")
    with Ranks(path, 2) as ranks, pytest.raises(AgreementError, match=r"rank 1: .*\n.*w1.weight: row 127, .*is NaN"):
        ranks.load()
    assert "is NaN" in capfd.readouterr().err


def test_every_miss_and_difference_is_in_one_message():
    def has(met: bool) -> tuple[Requirement, ...]:
        return (Requirement("a thing", met, "one" if met else "none", "get one"),)

    reports = [Report(rank, has(rank != 2), {"torch": "2.13", "Python": "3.11"}) for rank in range(3)]
    assert compare(reports[:2]) is None
    reports[1] = replace(reports[1], facts={"torch": "2.12", "Python": "3.11"})
    message = str(compare(reports))
    assert "over 3 ranks cannot start: 2 problems" in message
    assert "rank 2: a thing: none; get one" in message
    assert "rank 1: torch: 2.12, but rank 0 has 2.13; all ranks need the same" in message


def test_a_busy_gpu_is_refused_with_what_it_has_and_needs():
    gib, device = 2**30, torch.device("cuda:1")
    assert room(device, 140 * gib, 141 * gib, 90 * gib).met
    busy = room(device, 12 * gib, 141 * gib, 90 * gib)
    assert not busy.met
    assert busy.found == "12.0 of 141.0 GiB are free, the rank's weights take 90.0 GiB"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-parallel-size", "3"], "num_attention_heads = 4: expected a multiple of 3, equally many heads"),
        (["--tensor-parallel-size", "8"], "o_groups = 4: expected a multiple of 8"),
        (["--tensor-parallel-size", "0"], "expected at least one rank"),
        (["--tensor-parallel-size", "2", "--device", "cpu:0"], "takes cpu, or cuda for one GPU per rank"),
        (["--check-ranks"], "needs --tensor-parallel-size 2 or more"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(capsys, options, message):
    assert main(["generate", "x", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are enough GPUs")
def test_more_ranks_than_gpus_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"over 2 ranks needs 2 GPUs, torch sees [01]: take fewer ranks"):
        Ranks(BUNDLED_MODEL, 2, device="cuda")


# -- failing together -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing(world: int, match: str, capfd: pytest.CaptureFixture[str], **settings: object) -> Iterator[Ranks]:
    """Ranks that write until they fail, after what the body does to them; all must say the same, and go."""
    with Ranks(BUNDLED_MODEL, world, **settings) as ranks:
        engine = ranks.engine(CONFIG)
        processes = [psutil.Process(pid) for pid in ranks.pids[1:]]
        told: list[str] = []
        ranks.on_failure(lambda failure: told.append(str(failure)))
        if not settings.get("faults"):
            write(engine, TEXTS[0], 8)
        yield ranks
        began = time.monotonic()
        with pytest.raises(RankFailure, match=match) as caught:
            write_on(engine)
        assert time.monotonic() - began < NOTICED_S
        wait_until(lambda: not any(process.is_running() for process in processes), "all ranks have gone")
        assert told == [str(caught.value)]
        with pytest.raises(RankFailure, match=match):
            write(engine, TEXTS[0], 1)
        said = capfd.readouterr().err
        for rank in range(1, world):
            if f"rank {rank} " not in str(caught.value):  # those that are not to blame
                assert f"flashstep: rank {rank}: {caught.value}" in said


def test_a_rank_that_is_killed_in_a_step_ends_all(capfd):
    with failing(4, r"rank 2 died (in|after) step \d+ \(killed by SIGKILL\)", capfd) as ranks:
        killing = subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -KILL {ranks.pids[2]}"])
    killing.wait()


def test_a_rank_that_is_stopped_ends_all(capfd):
    with failing(
        2, r"rank 1 has been silent for 2 s (in|after) step \d+: it is stopped or hangs", capfd, silence_s=2
    ) as ranks:
        os.kill(ranks.pids[1], signal.SIGSTOP)


def test_a_rank_that_lives_but_does_not_get_on_ends_all(capfd):
    match = r"step 3 has taken more than 2 s: rank 1 hangs, rank 0 waits"
    with failing(2, match, capfd, step_deadline_s=2, faults=Faults(hang=(1, 3))):
        pass


@pytest.mark.parametrize(
    ("check", "where"), [(True, r"(router|index) choice of layer \d|hidden state"), (False, "hidden state")]
)
def test_a_rank_that_computes_something_else_ends_all(capfd, check, where):
    match = rf"rank 1 differs from rank 0 in step 4: {where}"
    with failing(2, match, capfd, check=check, faults=Faults(corrupt_sums=(1, 4))):
        pass


def test_a_fault_of_the_leader_in_a_call_ends_all(capfd):
    with Ranks(BUNDLED_MODEL, 2) as ranks:
        loaded = ranks.load()
        with pytest.raises(ZeroDivisionError), ranks.call("logits", torch.zeros(1, loaded.config.hidden_size)):
            1 / 0  # noqa: B018
        with pytest.raises(RankFailure, match="rank 0 failed before step 1: ZeroDivisionError"):
            loaded.model.logits(torch.zeros(1, loaded.config.hidden_size))
    assert "flashstep: rank 1: rank 0 failed" in capfd.readouterr().err


# -- the leader as a process ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A command over two ranks, once both exist; and the process of the other rank."""
    command = [*COMMAND, *arguments, "--tensor-parallel-size", "2", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as leader:
        try:
            wait_until(lambda: ranks_below(leader.pid), "the other rank is started", 30)
            others = ranks_below(leader.pid)
            assert len(others) == 1
            yield leader, others
        finally:
            leader.kill()


def ranks_below(pid: int) -> list[psutil.Process]:
    """Processes of other ranks; a leader may have children for a moment that are none."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "flashstep.ranks.worker" in child.cmdline():
                found.append(child)
    return found


def ended(processes: Sequence[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("stopped", [False, True], ids=["", "beside a stopped rank"])
def test_no_rank_outlives_the_leader(blow, stopped):
    if blow is signal.SIGSTOP and stopped:
        pytest.skip("nobody is left to notice")
    with process("generate", TEXTS[0], "--max-tokens", "4000", "--ignore-eos") as (leader, others):
        assert leader.stdout.read(20), "the text has begun"
        if stopped:
            others[0].suspend()
        leader.send_signal(blow)
        wait_until(lambda: ended(others), "the other rank has ended")
        wait_until(lambda: leader.poll() is not None, "the leader has ended")
        assert leader.returncode == -signal.SIGKILL
        said = leader.stderr.read()
        what = "died" if blow is signal.SIGKILL else "has been silent for 5 s"
        assert re.search(rf"flashstep: rank 1: rank 0 {what} (in|after) step \d+", said), said


def test_an_interrupt_ends_all_without_a_word_of_the_others():
    with process("generate", TEXTS[0], "--max-tokens", "4000", "--ignore-eos") as (leader, others):
        assert leader.stdout.read(20), "the text has begun"
        for each in (leader, *others):  # as a terminal does
            os.kill(each.pid, signal.SIGINT)
        assert leader.wait(NOTICED_S) == 130
        assert ended(others)
        assert leader.stderr.read().strip() == "interrupted"


@contextlib.contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process("serve", "--port", str(port), "--grace", "1") as (leader, others):
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            assert leader.poll() is None, leader.stderr.read()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/health").status_code == 200
            return False

        wait_until(healthy, "the server is ready", 60)
        yield leader, others, url


def test_a_server_over_two_ranks_answers_and_ends_in_order(alone):
    with server() as (leader, others, url):
        body = {"prompt": TEXTS[0], "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert load().tokenizer.decode(alone[0]).startswith(answer["choices"][0]["text"])
        assert answer["usage"]["completion_tokens"] > 8
        for each in (leader, *others):  # as a service manager does
            os.kill(each.pid, signal.SIGTERM)
        assert leader.wait(NOTICED_S) == 0
        assert ended(others)
        assert "rank 1" not in leader.stderr.read()


def test_a_server_whose_rank_dies_tells_its_clients_and_ends():
    with server() as (leader, others, url):
        body = {"prompt": TEXTS[0], "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            wait_until(lambda: "requests_running 1.0" in httpx.get(f"{url}/metrics").text, "the request runs")
            others[0].kill()
            assert leader.wait(NOTICED_S) == 1
            answer = asked.result()
        assert answer.status_code >= 500
        assert "rank 1 died" in answer.text
        assert re.search(
            r"flashstep: error: rank 1 died (in|after) step \d+ \(killed by SIGKILL\)", leader.stderr.read()
        )


def test_an_idle_server_whose_rank_dies_ends():
    with server() as (leader, others, _):
        others[0].kill()
        assert leader.wait(NOTICED_S) == 1
        assert "flashstep: error: rank 1 died before step 1 (killed by SIGKILL)" in leader.stderr.read()


# -- the pulse --------------------------------------------------------------------------------------------------------


def test_a_pulse_tells_silence_from_an_end():
    ours, theirs = socket.socketpair()
    lost: list[tuple[int, Loss]] = []
    heard: list[dict[str, object]] = []
    pulse = Pulse(
        {3: ours},
        silence_s=1.0,
        beat=lambda: {"beat": 1},
        heard=lambda rank, message: heard.append(message),
        lost=lambda rank, how: lost.append((rank, how)),
        tick=lambda: None,
    )
    pulse.start()
    try:
        theirs.sendall(b'{"a": 1}\n{"b"')
        theirs.sendall(b": 2}\n")
        wait_until(lambda: heard == [{"a": 1}, {"b": 2}], "messages arrive whole")
        assert not lost
        wait_until(lambda: lost == [(3, Loss.SILENT)], "silence is noticed")
        theirs.close()
        wait_until(lambda: lost[1:] == [(3, Loss.GONE)], "the end is noticed")
    finally:
        pulse.stop()
        pulse.close()
