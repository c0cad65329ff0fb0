"""The engine's thread: clients that leave, steps that raise, shutdown; nobody waits for ever."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from flashstep.async_engine import AsyncEngine, start
from flashstep.executor import Step
from flashstep.params import SamplingParams
from flashstep.requests import Delta, EngineDead, GenerationRequest, RequestError
from flashstep.settings import EngineConfig

GREEDY = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(max_num_seqs=4, max_model_len=1024, kv_cache_memory=1 << 26)


def ask(engine: AsyncEngine, text: str, **fields) -> GenerationRequest:
    prompt = (engine.tokenizer.bos_id, *engine.tokenizer.encode(text))
    return GenerationRequest(**({"prompt": prompt, "params": GREEDY, "max_tokens": 20} | fields))


async def loaded(config: EngineConfig = CONFIG) -> AsyncEngine:
    engine = start(None, config)
    while not engine.stats().ready:
        assert engine.stats().failure is None
        await asyncio.sleep(0.02)
    return engine


async def collect(engine: AsyncEngine, request: GenerationRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


async def until_at_rest(engine: AsyncEngine, patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        stats = engine.stats()
        free = (stats.free_slots, stats.free_pages) == (stats.total_slots, stats.total_pages)
        if free and stats.running + stats.waiting == 0:
            return
        assert time.monotonic() < deadline, f"something is still held: {stats}"
        await asyncio.sleep(0.02)


def test_many_tasks_get_what_one_would():
    async def scenario() -> None:
        engine = await loaded()
        texts = [f"def function_{i}(x):\n" for i in range(9)]
        alone = [await collect(engine, ask(engine, text)) for text in texts[:3]]
        together = await asyncio.gather(*(collect(engine, ask(engine, text)) for text in texts))
        for before, now in zip(alone, together, strict=False):
            assert [t for d in before for t in d.tokens] == [t for d in now for t in d.tokens]
        assert all(deltas[-1].usage.completion_tokens == 20 for deltas in together)
        await until_at_rest(engine)
        await engine.shutdown(1)

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["queued", "first delta", "cancelled"])
def test_a_client_that_leaves_frees_everything(when):
    async def scenario() -> None:
        engine = await loaded(EngineConfig(max_num_seqs=1, max_model_len=1024, kv_cache_memory=1 << 26))
        stay = asyncio.create_task(collect(engine, ask(engine, "import", max_tokens=60)))
        await asyncio.sleep(0.1)
        if when == "cancelled":
            task = asyncio.create_task(collect(engine, ask(engine, "class", max_tokens=900)))
            await asyncio.sleep(0.3)
            task.cancel()
        elif when == "queued":
            deltas = engine.generate(ask(engine, "class", max_tokens=900))
            waiting = asyncio.create_task(anext(deltas))
            await asyncio.sleep(0.05)
            waiting.cancel()
        else:
            deltas = engine.generate(ask(engine, "class", max_tokens=900))
            await anext(deltas)
            await deltas.aclose()
        assert (await stay)[-1].finish_reason == "length"
        await until_at_rest(engine)
        assert engine.stats().completion_tokens < 700
        await engine.shutdown(1)

    asyncio.run(scenario())


def test_a_step_that_raises_ends_all_requests_with_the_reason(monkeypatch):
    async def scenario() -> None:
        engine = await loaded()
        tasks = [asyncio.create_task(collect(engine, ask(engine, f"x{i}", max_tokens=900))) for i in range(6)]
        await asyncio.sleep(0.3)

        def broken(*_: object) -> None:
            raise RuntimeError("a wire came loose")

        monkeypatch.setattr(Step, "__call__", broken)
        ends = [deltas[-1] for deltas in await asyncio.wait_for(asyncio.gather(*tasks), 20)]
        assert {end.finish_reason for end in ends} == {"error"}
        assert all("a wire came loose" in end.error for end in ends)
        stats = engine.stats()
        assert not stats.ready
        assert "a wire came loose" in stats.failure
        with pytest.raises(EngineDead, match="a wire came loose"):
            await collect(engine, ask(engine, "x"))
        await asyncio.wait_for(engine.shutdown(1), 20)

    asyncio.run(scenario())


@pytest.mark.parametrize("grace_s", [30.0, 0.0])
def test_shutdown_finishes_or_cuts_off(grace_s):
    async def scenario() -> None:
        engine = await loaded()
        task = asyncio.create_task(collect(engine, ask(engine, "import os", max_tokens=60)))
        await asyncio.sleep(0.2)
        await asyncio.wait_for(engine.shutdown(grace_s), 60)
        end = (await asyncio.wait_for(task, 5))[-1]
        if grace_s:
            assert (end.finish_reason, end.usage.completion_tokens) == ("length", 60)
        else:
            assert (end.finish_reason, end.error) == ("error", "the server is shutting down")
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(engine, ask(engine, "x"))

    asyncio.run(scenario())


def test_refusals_come_before_any_work():
    async def scenario() -> None:
        engine = start(None, CONFIG)
        with pytest.raises(EngineDead, match="loading"):
            engine.check(ask(engine, "x"))
        while not engine.stats().ready:
            await asyncio.sleep(0.02)
        with pytest.raises(RequestError, match="prompt"):
            await collect(engine, ask(engine, "x", prompt=()))
        assert engine.stats().steps == 0
        await engine.shutdown(0)

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match="no such file"):
        start(tmp_path, CONFIG)

    async def scenario() -> None:
        engine = start(None, EngineConfig(kv_cache_memory=10))
        while engine.stats().failure is None:
            await asyncio.sleep(0.02)
        assert "one page" in engine.stats().failure
        heard: list[BaseException] = []
        engine.on_build_error(heard.append)
        assert "one page" in str(heard[0])
        with pytest.raises(EngineDead, match="one page"):
            engine.check(ask(engine, "x"))
        await asyncio.wait_for(engine.shutdown(0), 10)

    asyncio.run(scenario())
