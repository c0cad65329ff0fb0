"""The portable path as a model and behind the engine: on a GPU where there is one, else in Triton's interpreter.

In the interpreter a row of the bundled model costs seconds, so that there a smaller model is compared and the rest are
slow tests.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from test_specialized import TEXT, ask, assert_same_up_to_near_ties, run

from flashstep import packed_weights as weights
from flashstep.checkpoint import Checkpoint
from flashstep.draft import Draft
from flashstep.engine import Engine
from flashstep.loading import CheckpointReader, LoadedModel, load
from flashstep.model import Model
from flashstep.packed_state import PackedState
from flashstep.portable.loading import load_portable
from flashstep.portable.model import PortableDraft, PortableModel
from flashstep.settings import EngineConfig
from flashstep.state import Rows, State
from flashstep.tiny import random_checkpoint, small_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
RING_ROWS = 16
CONFIG = EngineConfig(max_num_seqs=4, max_model_len=1024, kv_cache_memory=1 << 28)
slow_in_the_interpreter = pytest.mark.skipif(False, reason="") if ON_GPU else pytest.mark.slow


@pytest.fixture(scope="module")
def portable() -> LoadedModel:
    return load_portable(device=DEVICE)


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    return load()


def state(loaded: LoadedModel, **options) -> State:
    """A state with two slots and room for 512 tokens in each; long chunks, and rings that cannot hold them."""
    made = loaded.state_type(
        loaded.config,
        num_slots=2,
        page_tokens=16,
        rows_per_request=RING_ROWS,
        chunk_rows=512,
        max_model_len=512,
        device=loaded.model.device,
        **options,
    )
    for _ in range(2):
        made.reserve(made.acquire(), 512)
    return made


def tokens_of(loaded: LoadedModel, count: int) -> list[int]:
    tokens = loaded.tokenizer.encode(TEXT * 40)
    return tokens[:count]


def feed(loaded: LoadedModel, state: State, parts, taps: bool = True) -> torch.Tensor:
    """Logits of a forward over `parts`, which the draft observes."""
    rows = Rows.of(parts, loaded.model.device)
    output = loaded.model.forward(state, rows)
    loaded.draft.observe(state, rows, output.taps)
    return loaded.model.logits(output.hidden).cpu()


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance."""
    one, other = one.float().cpu(), other.float().cpu()
    assert torch.isfinite(one).all()
    return float((one - other).norm() / other.norm())


# bf16 against float32 activations of the reference itself: 0.08 of the hidden rows, 0.05 of the taps and windows.
ROUNDINGS = 0.15
COUNT = 130 if ON_GPU else 24


@slow_in_the_interpreter
def test_values_agree_with_the_reference(portable, reference):
    mine = state(portable)
    theirs = State(reference.config, num_pages=64, page_tokens=16, rows_per_request=512, max_model_len=512)
    theirs.reserve(theirs.acquire(), 512)
    tokens = tokens_of(reference, COUNT)
    done = 0
    for count in (COUNT - 7, 1, 6):
        part = [(0, done, tokens[done : done + count])]
        got = portable.model.forward(mine, Rows.of(part, DEVICE))
        want = reference.model.forward(theirs, Rows.of(part))
        assert far(got.hidden, want.hidden) < ROUNDINGS
        assert far(got.taps, want.taps) < ROUNDINGS
        portable.draft.observe(mine, Rows.of(part, DEVICE), got.taps)
        reference.draft.observe(theirs, Rows.of(part), want.taps)
        done += count
    for one, other in ((mine.window, theirs.window), (mine.draft_window, theirs.draft_window)):
        kept = torch.arange(max(0, done - 64), done)
        for layer in range(one.codes.shape[0]):
            assert far(one[layer][0, kept % mine.ring], other[layer, 0, kept]) < ROUNDINGS, layer
    drafts = [
        loaded.draft.propose(
            kept,
            torch.tensor([0], device=device),
            torch.tensor([done - 1], device=device),
            torch.tensor([tokens[0]], device=device),
            lambda place, _: torch.tensor([tokens[place]], device=device),  # noqa: B023 - called at once
        )
        for loaded, kept, device in ((portable, mine, DEVICE), (reference, theirs, torch.device("cpu")))
    ]
    assert far(drafts[0].logits, drafts[1].logits) < ROUNDINGS
    assert (drafts[0].confidence.cpu() - drafts[1].confidence).abs().max() < 0.4


@slow_in_the_interpreter
def test_a_prompt_in_chunks_is_the_whole_prompt(portable):
    """The chunks cross the ring's length, pages, groups of two, and the Engram's lookback."""
    tokens = tokens_of(portable, COUNT)
    whole, cut = state(portable), state(portable)
    wanted = feed(portable, whole, [(0, 0, tokens)])
    found, done = [], 0
    for count in (COUNT - 13, 3, 1, 9):
        found.append(feed(portable, cut, [(0, done, tokens[done : done + count])]))
        done += count
    same(torch.cat(found), wanted)
    kept = torch.arange(max(0, done - 64), done) % whole.ring
    for one, other in ((whole.window, cut.window), (whole.draft_window, cut.draft_window)):
        assert far(one[:, 0, kept], other[:, 0, kept]) < ROUNDINGS
    assert torch.equal(whole.history, cut.history)


@slow_in_the_interpreter
def test_a_mixed_batch_is_each_request_alone(portable):
    first, second = tokens_of(portable, COUNT), tokens_of(portable, COUNT + 11)[11:]
    alone, mixed = state(portable), state(portable)
    for each in (alone, mixed):
        feed(portable, each, [(1, 0, second[: COUNT // 2])])
    wanted = torch.cat(
        [
            feed(portable, alone, [(0, 0, first)]),
            feed(portable, alone, [(1, COUNT // 2, second[COUNT // 2 : COUNT // 2 + 6])]),
        ]
    )
    parts = [(0, 0, first), (1, COUNT // 2, second[COUNT // 2 : COUNT // 2 + 6])]
    same(feed(portable, mixed, parts), wanted)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal up to float32 sums that another number of rows may cut otherwise; a quantizer's flip moves a row more."""
    error = (got - wanted).abs().amax(-1)
    assert error.median() < 0.2, error
    assert (got.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9


@slow_in_the_interpreter
def test_pages_keep_the_windows_that_a_long_chunk_displaces(portable):
    """What the rings have lost was written with the chunk, other pages come from them."""
    count = 5 * 16 + 5 if not ON_GPU else 17 * 16 + 5
    tokens = tokens_of(portable, count)
    at_once, slowly = (state(portable, keep_windows=True) for _ in range(2))
    feed(portable, at_once, [(0, 0, tokens[:9])])  # a page that is open when the long chunk begins
    feed(portable, at_once, [(0, 9, tokens[9:])])
    for page in range(count // 16):
        at_once.save_windows(0, page)
    done = 0
    while done < count:
        part = tokens[done : done + 16]
        feed(portable, slowly, [(0, done, part)])
        if len(part) == 16:
            slowly.save_windows(0, done // 16)
        done += 16
    pages = slice(0, count // 16)
    assert at_once.pages(0)[pages] == slowly.pages(0)[pages]
    held = at_once.pages(0)[pages]
    got, wanted = (each.page_windows[:, held] for each in (at_once, slowly))
    assert far(got, wanted) < 0.1
    assert (wanted.float() != 0).any(-1).all()


@pytest.mark.parametrize("text", [TEXT, TEXT * 12], ids=["short", "long"])
@slow_in_the_interpreter
def test_greedy_text_is_the_references(portable, reference, text):
    asked = ask(portable, text, tokens=48 if ON_GPU else 8)
    got = run(Engine(portable, CONFIG), asked)[0]
    want = run(Engine(reference, CONFIG), asked)[0]
    assert_same_up_to_near_ties(reference, asked.prompt, got, want)


@slow_in_the_interpreter
def test_the_prefix_cache_continues_exactly(portable):
    """Behind pages that one long chunk filled, and from another slot."""
    engine = Engine(portable, replace(CONFIG, max_num_batched_tokens=512))
    asked = ask(portable, TEXT * 12, tokens=24 if ON_GPU else 4)
    assert len(asked.prompt) > engine.state.ring
    cold = run(engine, asked)[0]
    other = ask(portable, "def main():\n", tokens=4)
    warm = run(engine, other, asked)[1]
    assert engine.stats().cache_hits == 1
    assert_same_up_to_near_ties(load(), asked.prompt, warm, cold)


@pytest.mark.skipif(not ON_GPU, reason="minutes in the interpreter")
def test_specialized_decode_goes_on_behind_portable_prompts(portable):
    from flashstep.specialized.loading import load_specialized

    loaded = load_specialized(device=DEVICE, max_rows=12)
    asked = [ask(portable, text, tokens=48) for text in (TEXT * 12, "def main():\n" * 30)]
    engine = Engine(loaded, CONFIG)
    assert engine.state.chunk_rows > 12
    got = run(engine, *asked, joins_after=3)
    for each, tokens in zip(asked, got, strict=True):
        wanted = run(Engine(portable, CONFIG), each)[0]
        assert_same_up_to_near_ties(load(), each.prompt, tokens, wanted)
    again = run(engine, asked[0])[0]
    assert engine.stats().cache_hits >= 1
    assert_same_up_to_near_ties(load(), asked[0].prompt, again, got[0])


# -- a small random model ---------------------------------------------------------------------------------------------

SMALL = {
    "num_hidden_layers": 3,
    "compress_ratios": [2, 1, 1, 0],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2],
    "index_topk": 4,
    "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 2,
    "engram_layer_ids": [1],
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 2,
    "dspark_target_layer_ids": [1, 2],
    "sliding_window": 4,
    "num_attention_heads": 4,
    "o_groups": 2,
    "n_routed_experts": 4,
}


def test_a_small_model_is_the_references(tmp_path):
    """A chunk that is longer than the rings, a step behind it, a draft; window, choice and candidates all cut off."""
    random_checkpoint(small_config(**SMALL), tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    config = checkpoint.config
    ids = torch.arange(config.vocab_size)
    reader = CheckpointReader(checkpoint, "cpu")
    theirs = Model(config, reader, ids)
    their_draft = Draft(theirs, reader)
    mine = PortableModel(weights.read(config, weights.CheckpointSource(checkpoint, 0, 1, DEVICE)), ids)
    my_draft = PortableDraft(mine)
    pages = {"page_tokens": 4, "max_model_len": 32}
    states = (
        PackedState(config, rows_per_request=3, chunk_rows=16, device=DEVICE, **pages),
        State(config, rows_per_request=32, **pages),
    )
    for each in states:
        each.reserve(each.acquire(), 20)
    assert states[0].ring < 12
    for start, count in ((0, 12), (12, 2)):
        part = [(0, start, list(range(start + 5, start + 5 + count)))]
        got, want = mine.forward(states[0], Rows.of(part, DEVICE)), theirs.forward(states[1], Rows.of(part))
        assert far(got.hidden, want.hidden) < ROUNDINGS
        assert far(got.taps, want.taps) < ROUNDINGS
        assert far(mine.logits(got.hidden), theirs.logits(want.hidden)) < ROUNDINGS
        my_draft.observe(states[0], Rows.of(part, DEVICE), got.taps)
        their_draft.observe(states[1], Rows.of(part), want.taps)
    places = [torch.tensor([value]) for value in (0, 13, 7)]
    proposals = [
        draft.propose(kept, *(p.to(device) for p in places), lambda place, _: torch.tensor([place + 3], device=device))  # noqa: B023
        for draft, kept, device in ((my_draft, states[0], DEVICE), (their_draft, states[1], torch.device("cpu")))
    ]
    assert far(proposals[0].logits, proposals[1].logits) < ROUNDINGS
    assert far(proposals[0].confidence, proposals[1].confidence) < ROUNDINGS
    with pytest.raises(TypeError, match="PackedState"):
        mine.forward(State(config, **pages), Rows.of([], DEVICE))


class Ranks:
    """Ranks as threads that take turns: one runs until it meets the others in a collective."""

    def __init__(self, world: int) -> None:
        self.baton, self.meeting = threading.Lock(), threading.Barrier(world, timeout=300)
        self.world, self.parts = world, {}

    def run(self, work) -> list:
        """What `work` (a rank, its peers) returns on every rank."""
        results, errors = [None] * self.world, []

        def thread(rank: int) -> None:
            with self.baton:
                try:
                    results[rank] = work(rank, _Rank(self, rank))
                except BaseException as error:
                    errors.append(error)
                    self.meeting.abort()

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(self.world)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not errors, errors
        return results


class _Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.met = ranks, rank, 0

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        self.met += 1
        self.ranks.parts[self.met, self.rank] = part
        self.ranks.baton.release()
        try:
            self.ranks.meeting.wait()
        finally:
            self.ranks.baton.acquire()
        return [self.ranks.parts[self.met, rank] for rank in range(self.ranks.world)]

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        first, *others = self._all(partial)
        return sum(others, start=first)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(part), dim=-1)


def test_two_ranks_are_one(tmp_path):
    random_checkpoint(small_config(**SMALL), tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    config, ids = checkpoint.config, torch.arange(checkpoint.config.vocab_size)
    part = [(0, 0, list(range(5, 10)))]

    def state(kind: type[State], device: torch.device) -> State:
        made = kind(config, rows_per_request=8, page_tokens=4, max_model_len=16, device=device)
        made.reserve(made.acquire(), 12)
        return made

    def propose(draft, kept: State, device: torch.device):
        places = (torch.tensor([value], device=device) for value in (0, 4, 7))
        return draft.propose(kept, *places, lambda place, _: torch.tensor([place + 3], device=device))

    def rank(number: int, peers: _Rank) -> tuple[torch.Tensor, ...]:
        packed = weights.read(config, weights.CheckpointSource(checkpoint, number, 2, DEVICE), number, 2)
        model, kept = PortableModel(packed, ids, peers), state(PackedState, DEVICE)
        output, draft = model.forward(kept, Rows.of(part, DEVICE)), PortableDraft(model)
        draft.observe(kept, Rows.of(part, DEVICE), output.taps)
        return output.hidden, model.logits(output.hidden), propose(draft, kept, DEVICE).logits

    found = Ranks(2).run(rank)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    reader = CheckpointReader(checkpoint, "cpu")
    model, kept = Model(config, reader, ids), state(State, torch.device("cpu"))
    output, draft = model.forward(kept, Rows.of(part)), Draft(model, reader)
    draft.observe(kept, Rows.of(part), output.taps)
    wanted = output.hidden, model.logits(output.hidden), propose(draft, kept, torch.device("cpu")).logits
    for one, other in zip(found[0], wanted, strict=True):
        assert far(one, other) < ROUNDINGS


# -- rings and pages, without a model ---------------------------------------------------------------------------------


def test_rings_that_a_long_chunk_ran_over_are_not_copied_to_pages():
    config = load().config
    kept = PackedState(config, page_tokens=16, rows_per_request=8, chunk_rows=512, max_model_len=512, keep_windows=True)
    slot = kept.acquire()
    kept.reserve(slot, 512)
    ring = kept.ring  # 64 + 8
    kept.window.codes.fill_(1)
    kept.page_windows.codes.fill_(2)
    pages = kept.pages(slot)

    def copied(page: int) -> bool:
        kept.page_windows.codes.fill_(2)
        kept.save_windows(slot, page)
        return bool((kept.page_windows.codes[: config.num_hidden_layers, pages[page]] == 1).all())

    kept.begin_chunk(Rows.of([(slot, 0, [1] * 5)]))
    kept.begin_chunk(Rows.of([(slot, 5, [1] * 200)]))  # positions up to 204; the open page was saved in front of it
    assert (kept.page_windows.codes[0, pages[0], :5] == 1).all()
    assert (kept.page_windows.codes[0, pages[0], 5:] == 2).all()
    assert [copied(page) for page in range(12)] == [16 * page >= 205 - ring for page in range(12)]
    kept.begin_chunk(Rows.of([(slot, 205, [1] * 3)]))
    assert not copied(7)
    assert copied(12)
    kept.release(slot)
    assert kept.acquire() == slot
    kept.reserve(slot, 32)
    pages = kept.pages(slot)
    assert copied(0)


def test_chunks_beyond_the_limit_are_refused():
    kept = State(load().config, rows_per_request=8, chunk_rows=20, page_tokens=16, max_model_len=64)
    kept.reserve(kept.acquire(), 64)
    kept.check(Rows.of([(0, 0, [1] * 20)]))
    with pytest.raises(ValueError, match="21 rows of slot 0 in one forward: at most 20"):
        kept.check(Rows.of([(0, 0, [1] * 21)]))
