import math

import pytest
import torch

from flashstep import jit
from flashstep.ops import Linear
from flashstep.params import SamplingParams
from flashstep.stages.accept import reference as sampling
from flashstep.stages.accept.cuda import SlotState
from flashstep.stages.head import cuda, reference
from flashstep.stages.head.cuda import DraftWorkspace, HeadWeights

BLOCK, HIDDEN, RANK = 5, 256, 64
LONG = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


class Case:
    """Requests that draft: weights, base logits and hidden rows, on every rank of a world."""

    def __init__(self, device, places, vocab, *, rank=RANK, hidden=HIDDEN, world=1, seed=0, block=BLOCK, slots=None):
        g = torch.Generator().manual_seed(seed)
        self.device, self.places, self.vocab, self.world, self.block = device, places, vocab, world, block
        self.embed = torch.randn(vocab, rank, generator=g).bfloat16()
        self.head = (torch.randn(vocab, rank, generator=g) * 0.3).bfloat16()
        self.confidence = (torch.randn(1, hidden + rank, generator=g) * 0.1).bfloat16()
        self.base = 2 * torch.randn(places * block, vocab, generator=g)
        self.hidden = torch.randn(places * block, hidden, generator=g).bfloat16()
        self.shard = vocab // world
        slots = slots or places
        self.slots = torch.randperm(slots, generator=g)[:places]
        self.params = {}
        self.states = [SlotState.allocate(slots, block, self.shard, device) for _ in range(world)]
        self.works = [DraftWorkspace.allocate(state, places, world) for state in self.states]
        for state, work in zip(self.states, self.works, strict=True):
            work.records.fill_(0x7F7F7F7F)
            work.confidence.fill_(math.nan)
            state.draft_logits.fill_(math.nan)
            state.draft_stats.fill_(math.nan)
            state.num_drafts.fill_(99)
            state.tokens.fill_(-7)
        self.g = g
        self.weights = [
            HeadWeights.pack(
                self.embed.to(device),
                self.head[r * self.shard : (r + 1) * self.shard].to(device),
                self.confidence.to(device),
            )
            for r in range(world)
        ]

    @property
    def state(self):
        return self.states[0]

    def load(self, temperatures):
        for place, temperature in enumerate(temperatures):
            slot = int(self.slots[place])
            seed = int(torch.randint(-(2**63), 2**63 - 1, (1,), generator=self.g))
            position = int(torch.randint(0, 10**6, (1,), generator=self.g))
            token = int(torch.randint(0, self.vocab, (1,), generator=self.g))
            self.params[place] = (SamplingParams(temperature=temperature), seed, position, token)
            for state in self.states:
                state.load(slot, position=position, token=token, seed=seed, params=self.params[place][0])
                state.num_drafts[slot] = 99

    def run(self, *, drafts=None, threshold=0.0, max_model_len=LONG, idle=()):
        drafts = self.block if drafts is None else drafts
        slots = self.slots.clone().int()
        slots[list(idle)] = -1
        rows = slots.repeat_interleave(self.block).to(self.device)
        per_rank = [
            cuda.draft(
                self.states[r],
                self.works[r],
                self.weights[r],
                draft_slot=rows,
                base=self.base[:, r * self.shard : (r + 1) * self.shard].contiguous().to(self.device),
                hidden=self.hidden.to(self.device),
                threshold=torch.tensor([threshold], device=self.device),
                drafts=drafts,
                max_model_len=max_model_len,
                rank=r,
                peers=self.works,
            )
            for r in range(self.world)
        ]
        for stage in zip(*per_rank, strict=True):
            for launch in stage:
                launch()
        if not jit.emulated(self.device):
            torch.cuda.synchronize()
        for state in self.states[1:]:
            assert torch.equal(state.tokens, self.state.tokens)
            assert torch.equal(state.num_drafts, self.state.num_drafts)
            assert torch.equal(state.draft_stats.view(torch.int32), self.state.draft_stats.view(torch.int32))

    def logits(self, slot):
        """[block, vocab] f32 as the kernels stored them."""
        return torch.cat([state.draft_logits[slot].cpu() for state in self.states], dim=-1)

    def check(self, *, drafts=None, idle=()):
        """Tokens, logits, figures and confidences of every place against the references."""
        drafts = self.block if drafts is None else drafts
        heads = reference.DraftHeads(self.embed, Linear(self.head), Linear(self.confidence))
        for place, (params, seed, position, token) in self.params.items():
            slot = int(self.slots[place])
            stored = self.logits(slot)
            tokens = self.state.tokens[slot].tolist()
            if place in idle:
                assert tokens == [token] + [-7] * self.block
                assert stored.isnan().all()
                assert int(self.state.num_drafts[slot]) == 99
                continue
            previous = torch.tensor([token])
            for i in range(drafts):
                row = place * self.block + i
                expected = self.base[row] + reference.markov(previous, heads)[0]
                # Products of bf16 are exact in float32; what is left are the roundings of so many sums of them.
                assert (stored[i] - expected).abs().max() < 2e-5 * expected.abs().max(), (place, i)
                where = torch.tensor([position + 1])
                q, drawn = sampling.draft_tokens(
                    stored[i : i + 1], params, seeds=torch.tensor([seed]), starts=where, positions=where + i
                )
                assert tokens[1 + i] == int(drawn), (place, i)
                best, total, logit, _ = self.state.draft_stats[slot, i].tolist()
                assert best == float(stored[i].max())
                assert logit == float(stored[i, int(drawn)])
                assert int(self.state.draft_stats.view(torch.int32)[slot, i, 3]) == 1
                if params.temperature > 0:
                    weight = math.exp((logit - best) / params.temperature) / total
                    assert weight == pytest.approx(float(q[0, int(drawn)]), rel=2e-5)
                confidence = reference.confidence(self.hidden[row][None], previous, heads)
                assert float(self.works[0].confidence[slot, i]) == pytest.approx(float(confidence), abs=1e-4)
                previous = drawn
            assert tokens[1 + drafts :] == [-7] * (self.block - drafts)


def test_packing_has_an_inverse_and_puts_registers_where_the_product_wants_them():
    weight = torch.arange(48 * 64).view(48, 64).bfloat16()
    packed = cuda.pack_markov_head(weight)
    assert torch.equal(cuda.unpack_markov_head(packed), weight)
    unit, lane = weight[16:32, 32:48], 13  # row 3, pair 1
    expected = [unit[3, 2:4], unit[11, 2:4], unit[3, 10:12], unit[11, 10:12]]
    assert torch.equal(packed[1, 2].view(32, 8)[lane], torch.cat(expected))
    with pytest.raises(ValueError, match="multiples of 16"):
        cuda.pack_markov_head(weight[:40])


@pytest.mark.parametrize(("places", "vocab"), [(1, 1024), (3, 1040), (9, 528)])
def test_chain(device, places, vocab):
    """Greedy and drawn requests side by side, an idle place between them, slots out of order, uneven strips."""
    case = Case(device, places, vocab, slots=places + 2, seed=vocab)
    case.load([0.0, 0.7, 1.0, 1.8, 0.0, 1.0, 0.3, 1.0, 2.5][-places:])
    idle = (1,) if places > 1 else ()
    case.run(idle=idle)
    case.check(idle=idle)
    assert (case.state.num_drafts[case.slots[0]] == BLOCK).all()
    expected = sorted(case.slots.tolist())
    untouched = [slot for slot in range(places + 2) if slot not in expected]
    assert case.state.draft_logits[untouched].isnan().all()


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_fewer_drafts(device, drafts):
    case = Case(device, 2, 256, seed=drafts)
    case.load([0.0, 1.0])
    case.run(drafts=drafts)
    case.check(drafts=drafts)
    assert (case.state.num_drafts == drafts).all()


@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_the_vocabulary_draft_as_one(device, world):
    case = Case(device, 3, 512, world=world, seed=5)
    case.load([0.0, 1.0, 0.6])
    case.run()
    case.check()


def test_equal_logits_give_the_lowest_token(device):
    case = Case(device, 2, 1024)
    case.load([0.0, 0.0])
    case.base.zero_()
    case.base[:, [700, 701, 900]] = 50.0
    case.weights[0].head.zero_()
    case.run()
    assert (case.state.tokens[:, 1:] == 700).all()


def test_verification_ends_where_survival_falls_below_the_threshold(device):
    case = Case(device, 4, 256, seed=9)
    case.load([1.0, 0.0, 1.0, 0.5])
    case.run()
    survival = case.works[0].confidence.cpu().double().sigmoid().cumprod(dim=-1)
    assert (survival > 0).all()
    seen = set()
    for threshold in [*(survival.flatten() * 1.0001).tolist(), *(survival.flatten() * 0.9999).tolist(), 1.1, 0.0]:
        expected = (survival >= threshold).long().cumprod(dim=-1).sum(dim=-1)
        case.run(threshold=threshold)
        assert case.state.num_drafts.tolist() == expected.tolist(), threshold
        seen |= set(expected.tolist())
        if len(seen) > 4 and threshold < 0.01:
            break
    assert len(seen) >= 4


def test_the_context_may_end_first(device):
    case = Case(device, 1, 256, seed=3)
    case.load([1.0])
    position = case.params[0][2]
    for room in (1, 3, 5, 9):
        case.run(max_model_len=position + 1 + room)
        assert case.state.num_drafts.tolist() == [min(room, BLOCK)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_logits_that_are_not_finite_end_the_block(device, value, everywhere):
    case = Case(device, 3, 512, seed=4)
    case.load([1.0, 0.0, 1.0])
    for place, index in ((0, 2), (1, 4)):
        case.base[place * BLOCK + index, slice(None) if everywhere else 77] = value
    case.run()
    by_place = case.state.num_drafts[case.slots].tolist()
    assert by_place == [2, 4, 5]
    assert ((case.state.tokens[:, 1:] >= 0) & (case.state.tokens[:, 1:] < 512)).all()
    case.params = {2: case.params[2]}
    case.check()


def test_a_place_does_not_depend_on_the_others(device):
    case = Case(device, 4, 512, seed=6)
    case.load([1.0, 0.0, 0.5, 1.5])
    case.run()
    slot = int(case.slots[2])
    tokens, logits = case.state.tokens[slot].clone(), case.logits(slot)
    case.run(idle=(0, 1, 3))
    assert torch.equal(case.state.tokens[slot], tokens)
    assert torch.equal(case.logits(slot), logits)


def test_what_does_not_fit_is_refused(device):
    fits = {"vocab_local": 64, "rank": 64, "hidden": 256, "block": 5, "world": 1, "drafts": 5, "places": 1}
    cuda.constants(**fits)
    for name, wrong in (("vocab_local", 40), ("rank", 24), ("hidden", 12), ("world", 9), ("drafts", 6), ("places", 33)):
        with pytest.raises(ValueError, match=f"{name} = {wrong}"):
            cuda.constants(**{**fits, name: wrong})
    case = Case(device, 1, 256)
    case.load([1.0])
    case.base = case.base[:, :128]
    with pytest.raises(ValueError, match="base"):
        case.run()
