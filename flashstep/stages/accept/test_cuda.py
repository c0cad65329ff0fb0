import math

import pytest
import torch
from scipy import stats

from flashstep import jit
from flashstep.params import SamplingParams
from flashstep.stages.accept import cuda, reference
from flashstep.stages.accept.cuda import Batch, Record, Ring, SlotState, Workspace
from flashstep.stages.accept.reference import Purpose

BLOCK = 5
NOISE = 3
LONG = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Case:
    """A batch on the device, with what the reference needs to decide the same."""

    def __init__(self, device, places, vocab, *, block=BLOCK, rows=None, world=1, slots=None, seed=0):
        self.device, self.places, self.vocab, self.block, self.world = device, places, vocab, block, world
        self.rows = block + 1 if rows is None else rows
        slots = places if slots is None else slots
        self.shard = vocab // world
        self.states = [SlotState.allocate(slots, block, self.shard, device) for _ in range(world)]
        self.batches = [Batch.allocate(places, self.rows, block, device) for _ in range(world)]
        self.works = [Workspace.allocate(places, self.rows, block, world, device) for _ in range(world)]
        self.rings = [Ring.allocate(3, places, block, device) for _ in range(world)]
        for work in self.works:  # nothing may be read that was not written in the step
            for buffer in (work.rows, work.races, work.histograms, work.progress, work.decisions):
                buffer.fill_(0x7F7F7F7F)
            work.excess.fill_(math.nan)
        self.g = generator(seed)
        self.draft_logits = torch.full((slots, block, vocab), math.nan)
        self.draft_ids = torch.zeros(slots, block, dtype=torch.int64)
        self.params: dict[int, tuple] = {}

    @property
    def state(self):
        return self.states[0]

    def load(self, slot, params, *, rule="standard", rates=(), seed=0, position=10, token=1, drafts=None, logits=None):
        """A request with `drafts` drafts; logits [drafts, vocab] f32 of q. The drafts are drawn from q."""
        drafts = 0 if logits is None else len(logits)
        self.params[slot] = (params, rule, rates, seed, position, drafts)
        ids = torch.zeros(drafts, dtype=torch.int64)
        for i in range(drafts):
            row = logits[i].double()
            if params.temperature == 0:
                ids[i] = row.argmax()
            else:
                q = (row / params.temperature).softmax(-1)
                u = reference.uniform(
                    torch.tensor([seed]),
                    torch.tensor([position + 1]),
                    torch.tensor([position + 1 + i]),
                    Purpose.DRAFT,
                    self.vocab,
                )
                ids[i] = reference.sample(q[None], u)[0]
        if drafts:
            self.draft_logits[slot, :drafts] = logits
        self.set_drafts(slot, ids)
        for rank, state in enumerate(self.states):
            state.load(slot, position=position, token=token, seed=seed, params=params, rule=rule, rates=rates)
            state.num_drafts[slot] = drafts
            local = self.draft_logits[slot, :, rank * self.shard : (rank + 1) * self.shard]
            state.draft_logits[slot].copy_(local)

    def set_drafts(self, slot, ids):
        """Make `ids` the drafts of a slot, as if drawn from its draft logits."""
        params, *_, drafts = self.params[slot]
        self.draft_ids[slot, :drafts] = ids
        for state in self.states:
            state.tokens[slot, 1 : 1 + drafts] = ids.int().to(self.device)
            for i in range(drafts):
                row = self.draft_logits[slot, i].double()
                total = ((row - row.max()) / max(params.temperature, 1e-30)).exp().sum()
                values = torch.tensor([row.max(), total, row[ids[i]], 0.0], dtype=torch.float32)
                state.draft_stats[slot, i] = values.to(self.device)

    def run(self, logits, slots, *, steps=("begin", "accept", "commit"), max_model_len=LONG):
        """One step; logits [places * rows, vocab] f32. Returns the records of rank 0."""
        ranks = range(self.world)
        for rank in ranks:
            batch = self.batches[rank]
            batch.batch_slot.copy_(torch.tensor(slots, dtype=torch.int32))
        per_rank = []
        for rank in ranks:
            state, batch, work = self.states[rank], self.batches[rank], self.works[rank]
            local = logits[:, rank * self.shard : (rank + 1) * self.shard].contiguous().to(self.device)
            launches = cuda.begin(state, batch, max_model_len=max_model_len) if "begin" in steps else []
            if "accept" in steps:
                levels = max(cuda.levels_of(params) for params, *_ in self.params.values()) if self.params else 0
                launches += cuda.accept(
                    state, batch, work, local, rank=rank, peers=self.works, block_rule=True, levels=levels
                )
            if "commit" in steps:
                launches += cuda.commit(
                    state, batch, work, self.rings[rank], noise_token=NOISE, max_model_len=max_model_len
                )
            per_rank.append(launches)
        for stage in zip(*per_rank, strict=True):  # ranks keep step at every launch
            for launch in stage:
                launch()
        if not jit.emulated(self.device):
            torch.cuda.synchronize()
        found = [self.rings[r].poll(int(self.states[r].step), self.places) for r in ranks]
        assert all(f == found[0] for f in found), "ranks decided differently"
        return found[0]

    def expected(self, logits, slots):
        """What the reference decides: a record per place."""
        records = []
        for place, slot in enumerate(slots):
            if slot < 0:
                records.append(Record(-1, [], 0, 0, False))
                continue
            params, rule, rates, seed, position, drafts = self.params[slot]
            drafts = min(drafts, self.rows - 1)
            rows = logits[place * self.rows :][: drafts + 1]
            if not torch.isfinite(rows).all():
                records.append(Record(slot, [], 0, drafts, True))
                continue
            p = reference.probabilities(rows, params)[None]
            shared = {
                "target_probs": p,
                "draft_ids": self.draft_ids[slot, :drafts][None],
            }
            numbers = {"seeds": torch.tensor([seed]), "positions": torch.tensor([position + 1])}
            if rule == "synthetic":
                done = reference.accept_synthetic(**shared, **numbers, rates=rates[:drafts])
            elif params.temperature == 0:
                done = reference.accept_greedy(**shared)
            else:
                q = (self.draft_logits[slot, :drafts].double() / params.temperature).softmax(-1)[None]
                done = reference.accept(**shared, **numbers, draft_probs=q, rule=rule)
            count = int(done.num_accepted[0])
            records.append(Record(slot, done.tokens[0, : count + 1].tolist(), count, drafts, False))
        return records


# --- random numbers ---

PROBE = """
#include "accept/sampling.cuh"
KERNEL(words, Words, 32, 1) {
  launch_dependents();
  wait_for_dependencies();
  int i = threadIdx.x;
  uint4 w = random_words((u64)p.seed[i], p.start[i], p.position[i], p.purpose[i], (u32)p.group[i]);
  u32 word[4] = {w.x, w.y, w.z, w.w};
  for (int k = 0; k < 4; k++) p.out[4 * i + k] = word[k];
}
KERNEL(scores, Scores, 32, 1) {
  launch_dependents();
  wait_for_dependencies();
  for (int i = threadIdx.x; i < p.count; i += 32) {
    p.exponential[i] = exponential(p.word[i]);
    p.key[i] = order_key(p.value[i]);
  }
}
"""


@pytest.fixture(scope="module")
def probe(device, tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "probe.cu"
    path.write_text(PROBE)
    words = [("seed", "const i64*"), *[(n, "const i32*") for n in ("start", "position", "purpose", "group")]]
    scores = [("word", "const u32*"), ("value", "const float*"), ("exponential", "float*"), ("key", "u32*")]
    source = jit.Source(
        path,
        {
            "words": jit.Params("Words", [*words, ("out", "u32*")]),
            "scores": jit.Params("Scores", [*scores, ("count", "int")]),
        },
    )
    return source.build(device)


def test_random_words_are_those_of_the_reference(device, probe):
    g = generator(1)
    seed = torch.randint(-(2**63), 2**63 - 1, (32,), generator=g)
    seed[:3] = torch.tensor([0, -1, 2**63 - 1])
    start = torch.randint(0, 2**20, (32,), generator=g)
    position = start + torch.randint(0, 6, (32,), generator=g)
    purpose = torch.randint(0, 4, (32,), generator=g)
    group = torch.randint(0, 32320, (32,), generator=g)
    out = torch.zeros(32, 4, dtype=torch.int32, device=device)
    ints = {"start": start, "position": position, "purpose": purpose, "group": group}
    fields = {name: value.int().to(device) for name, value in ints.items()}
    probe.launch("words", grid=1, block=32, seed=seed.to(device), out=out, **fields)()
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    expected = torch.stack(reference.philox((group, position, start, purpose), (low, high)), dim=-1)
    assert torch.equal(out.cpu().long() & 0xFFFFFFFF, expected)


def test_exponential_is_accurate_over_all_words_and_keys_order_floats(device, probe):
    g = generator(2)
    words = torch.cat(
        [
            torch.arange(64),
            2**32 - 1 - torch.arange(64),
            2**31 + torch.arange(-64, 64),
            2 ** torch.arange(32),
            torch.randint(0, 2**32, (4000,), generator=g),
        ]
    )
    values = torch.randn(len(words), generator=g) * 10.0 ** torch.randint(-30, 30, (len(words),), generator=g)
    values[:6] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38])
    signed = torch.where(words >= 2**31, words - 2**32, words).int()
    out = torch.full((len(words),), math.nan, device=device)
    keys = torch.zeros(len(words), dtype=torch.int32, device=device)
    fields = {"word": signed.to(device), "value": values.to(device), "exponential": out, "key": keys}
    probe.launch("scores", grid=1, block=32, count=len(words), **fields)()
    exact = -torch.log1p(-(words.double() + 0.5) / 2.0**32)
    assert ((out.cpu().double() - exact).abs() / exact).max() < 5e-7
    order = values.double().unsqueeze(0) - values.double().unsqueeze(1)
    key = keys.cpu().long() & 0xFFFFFFFF
    assert torch.equal(order.sign().long(), (key.unsqueeze(0) - key.unsqueeze(1)).sign())


def test_synthetic_words_are_exact():
    for rate in (0.0, 1e-20, 2.0**-33, 2.0**-32, 0.1, 0.5, 0.7, 1 - 2.0**-40, 1.0):
        bound = cuda.synthetic_word(rate)
        for word in {0, 1, 2**31, 2**32 - 1, *range(max(0, bound - 2), min(2**32, bound + 3))}:
            assert (word < bound) == ((word + 0.5) / 2.0**32 < rate), (rate, word)


# --- acceptance against the reference ---

PLAIN = [
    (SamplingParams(temperature=0), "standard"),
    (SamplingParams(), "standard"),
    (SamplingParams(temperature=0.6), "block"),
    (SamplingParams(temperature=1.5), "block"),
    (SamplingParams(temperature=0.3), "synthetic"),
    (SamplingParams(temperature=0), "synthetic"),
    (SamplingParams(), "block"),
    (SamplingParams(temperature=0), "block"),
]
FILTERED = [
    (SamplingParams(top_k=20), "standard"),
    (SamplingParams(temperature=0.8, top_p=0.9), "block"),
    (SamplingParams(temperature=1.2, min_p=0.05), "standard"),
    (SamplingParams(temperature=0.9, top_k=50, top_p=0.8, min_p=0.02), "block"),
    (SamplingParams(temperature=0.7, top_k=1), "standard"),
    (SamplingParams(top_p=0.5), "synthetic"),
    (SamplingParams(top_k=10**6, top_p=1e-6), "block"),
    (SamplingParams(temperature=0, top_k=3, top_p=0.5), "standard"),
]
RATES = (0.9, 0.7, 0.7, 0.5, 0.4)


def requests(case, kinds, seed, *, spread=3.0, apart=0.8, counts=None):
    """Load a request per slot with 0..block drafts; returns target logits [slots, block + 1, vocab]."""
    g = generator(seed)
    target = spread * torch.randn(len(kinds), case.block + 1, case.vocab, generator=g)
    for slot, (params, rule) in enumerate(kinds):
        drafts = case.block - slot % (case.block + 1) if counts is None else counts[slot]
        noisy = target[slot, :drafts] + apart * torch.randn(drafts, case.vocab, generator=g)
        case.load(
            slot,
            params,
            rule=rule,
            rates=RATES[: case.block] if rule == "synthetic" else (),
            seed=int(torch.randint(-(2**63), 2**63 - 1, (1,), generator=g)),
            position=int(torch.randint(0, 10**6, (1,), generator=g)),
            logits=noisy,
        )
    return target


def rows_of(case, target, slots, seed=0):
    """Row logits of a batch; what belongs to no request is NaN."""
    logits = torch.full((case.places * case.rows, case.vocab), math.nan)
    for place, slot in enumerate(slots):
        if slot >= 0:
            count = min(case.params[slot][-1], case.rows - 1) + 1
            logits[place * case.rows : place * case.rows + count] = target[slot, :count]
    return logits


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocab", [1024, 1040])
def test_a_mixed_batch_decides_as_the_reference(device, seed, vocab):
    kinds = PLAIN + FILTERED
    slots = [3, -1, 0, 1, 2, *range(4, 16)]  # an empty place, and slots out of order
    case = Case(device, len(slots), vocab)
    target = requests(case, kinds, seed)
    logits = rows_of(case, target, slots)
    found = case.run(logits, slots)
    assert found == case.expected(logits, slots)
    assert len({r.accepted for r in found}) >= 3, "the data shows too little"


@pytest.mark.parametrize("kinds", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_many_drafts_and_runs(device, kinds):
    """All with five drafts that are often right: long runs, and every place a rejection can be at."""
    accepted = set()
    for seed in range(4):
        case = Case(device, 8, 512)
        target = requests(case, kinds, 100 + seed, spread=4.0, apart=0.4, counts=[5] * 8)
        slots = list(range(8))
        logits = rows_of(case, target, slots)
        found = case.run(logits, slots)
        assert found == case.expected(logits, slots)
        accepted |= {r.accepted for r in found}
    assert len(accepted) >= 4


def test_residuals_of_block_verification(device):
    """Drafts that the target likes less: behind those that stand, p competes at a weight below 1."""
    inside = 0
    for seed in range(6):
        case = Case(device, 12, 64)
        target = requests(case, [(SamplingParams(), "block")] * 12, 200 + seed, spread=1.0, apart=1.5, counts=[5] * 12)
        slots = list(range(12))
        logits = rows_of(case, target, slots)
        found = case.run(logits, slots)
        assert found == case.expected(logits, slots)
        inside += sum(0 < r.accepted < 5 for r in found)
    assert inside >= 20


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_fewer_rows_than_drafts(device, rows):
    """A bucket of fewer rows verifies the first drafts, and the last one's numbers are those of a bonus."""
    case = Case(device, 8, 256, rows=rows)
    target = requests(case, PLAIN, 7, apart=0.3, counts=[5] * 8)
    slots = list(range(8))
    logits = rows_of(case, target, slots)
    found = case.run(logits, slots)
    assert found == case.expected(logits, slots)
    assert all(r.drafted == rows - 1 for r in found)


@pytest.mark.parametrize("block", [1, 2])
def test_smaller_blocks(device, block):
    case = Case(device, 8, 128, block=block)
    target = requests(case, PLAIN, 11, apart=0.5, counts=[block] * 8)
    slots = list(range(8))
    logits = rows_of(case, target, slots)
    assert case.run(logits, slots) == case.expected(logits, slots)


@pytest.mark.parametrize("kinds", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_the_vocabulary_decide_as_one(device, world, kinds):
    """Ranks share nothing but records and histograms; every one of them comes to the same tokens."""
    case = Case(device, 8, 512, world=world)
    target = requests(case, kinds, 21, apart=0.5, counts=[5, 5, 4, 5, 5, 3, 5, 1])
    slots = list(range(8))
    logits = rows_of(case, target, slots)
    assert case.run(logits, slots) == case.expected(logits, slots)


def test_shards_looped_back(device):
    """Without peers a larger world's records go to every slab: deciding twice over the same shard changes nothing."""
    case = Case(device, 8, 256)
    case.works = [Workspace.allocate(8, BLOCK + 1, BLOCK, 2, device)]
    target = requests(case, PLAIN, 22, apart=0.5, counts=[5] * 8)
    slots = list(range(8))
    logits = rows_of(case, target, slots)
    batch, work = case.batches[0], case.works[0]
    batch.batch_slot.copy_(torch.tensor(slots, dtype=torch.int32))
    launches = cuda.begin(case.state, batch, max_model_len=LONG)
    launches += cuda.accept(case.state, batch, work, logits.to(device), block_rule=True, levels=0)
    launches += cuda.commit(case.state, batch, work, case.rings[0], noise_token=NOISE, max_model_len=LONG)
    for launch in launches:
        launch()
    if not jit.emulated(device):
        torch.cuda.synchronize()
    found = case.rings[0].poll(1, 8)
    assert [r.accepted for r in found if r.slot in (0, 7)] == [
        r.accepted for r in case.expected(logits, slots) if r.slot in (0, 7)
    ]


def test_extreme_logits_and_temperatures(device):
    case = Case(device, 8, 64)
    kinds = [
        (SamplingParams(temperature=1e-3), "standard"),
        (SamplingParams(temperature=1e4), "standard"),
        (SamplingParams(temperature=1e-45), "block"),
        (SamplingParams(temperature=1e-3, top_k=5, top_p=0.9), "block"),
        (SamplingParams(temperature=0), "standard"),
        (SamplingParams(min_p=1.0), "standard"),
        (SamplingParams(top_k=63), "standard"),
        (SamplingParams(temperature=50.0, top_p=0.99), "standard"),
    ]
    target = requests(case, kinds, 31, spread=10.0, apart=0.1, counts=[2] * 8)
    target[:, :, 5] = 3e38
    target[:, :, 6] = -3e38
    slots = list(range(8))
    logits = rows_of(case, target, slots)
    assert case.run(logits, slots) == case.expected(logits, slots)


# --- what filters keep ---


def kept_by_record(case, row, params, logits):
    """Mask [vocab] of what the ranks' own records say is kept."""
    kept = []
    for rank, shard in enumerate(logits.split(case.shard)):
        words = case.works[rank].rows[rank, row].cpu()
        key, last = int(words[5]) & 0xFFFFFFFF, int(words[6])
        bits = (shard + 0.0).view(torch.int32).long() & 0xFFFFFFFF
        keys = torch.where(bits >= 2**31, 0xFFFFFFFF - bits, bits + 2**31)
        ids = torch.arange(len(shard)) + rank * case.shard
        weight = ((shard.double() - logits.double().max()) / params.temperature).exp()
        kept.append(((keys > key) | ((keys == key) & (ids <= last))) & (weight >= params.min_p))
    return torch.cat(kept)


@pytest.mark.parametrize("world", [1, 5])
@pytest.mark.parametrize("levels", [None, 40, 3, 1])
def test_filters_keep_what_the_reference_keeps(device, levels, world):
    """Also with few distinct logits, where the cut falls among equals and the lowest ids are kept."""
    vocab, g = 1040, generator(41)
    kinds = [
        SamplingParams(top_k=1),
        SamplingParams(top_k=2),
        SamplingParams(top_k=500),
        SamplingParams(top_k=1039),
        SamplingParams(top_p=0.013),
        SamplingParams(top_p=0.5137),
        SamplingParams(top_p=0.9931, temperature=1.4),
        SamplingParams(top_p=0.7771, temperature=0.2),
        SamplingParams(top_k=77, top_p=0.8123),
        SamplingParams(top_k=700, top_p=0.2345, temperature=3.0),
        SamplingParams(min_p=0.31),
        SamplingParams(top_k=100, top_p=0.6543, min_p=0.111, temperature=1.7),
    ]
    case = Case(device, len(kinds), vocab, block=1, rows=1, world=world)
    logits = 3 * torch.randn(len(kinds), vocab, generator=g)
    if levels is not None:
        logits = torch.randn(levels, generator=g)[torch.randint(0, levels, logits.shape, generator=g)]
        logits[:, ::7] = -logits[:, ::7].abs() * 0.0  # both zeros, which are equal
    for slot, params in enumerate(kinds):
        case.load(slot, params, seed=slot)
    case.run(logits, list(range(len(kinds))), steps=("begin", "accept"))
    for row, params in enumerate(kinds):
        p = reference.probabilities(logits[row : row + 1], params)[0]
        kept = kept_by_record(case, row, params, logits[row])
        assert torch.equal(kept, p > 0), (row, params, int(kept.sum()), int((p > 0).sum()))
        total = float(case.works[0].rows.view(torch.float32)[:, row, 1].sum())
        exact = (((logits[row].double() - logits[row].double().max()) / params.temperature).exp() * kept).sum()
        assert total == pytest.approx(float(exact), rel=1e-5)


def test_filters_of_a_wide_row(device):
    """Rows whose logits crowd together, far from zero and at the ends of a block's part."""
    vocab, g = 4096, generator(42)
    logits = torch.stack(
        [
            1000 + 0.01 * torch.randn(vocab, generator=g),
            -1000 - torch.rand(vocab, generator=g),
            torch.full((vocab,), 2.5),
            torch.arange(vocab).float().neg() / 100,
            torch.arange(vocab).float() * 1e-20,
        ]
    )
    params = SamplingParams(top_k=3000, top_p=0.87654)
    case = Case(device, len(logits), vocab, block=1, rows=1)
    for slot in range(len(logits)):
        case.load(slot, params)
    case.run(logits, list(range(len(logits))), steps=("begin", "accept"))
    for row in range(len(logits)):
        p = reference.probabilities(logits[row : row + 1], params)[0]
        assert torch.equal(kept_by_record(case, row, params, logits[row]), p > 0), row


@pytest.mark.parametrize("asked", ["top-k", "top-p", "both"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_search_ends_whatever_the_logits(device, world, asked):
    """Values that crowd around zero, or are neighbours as floats, or few and far apart: the most levels it can take."""
    vocab, rows, g = 128, 48, generator(43)
    case = Case(device, rows, vocab, block=1, rows=1, world=world)
    kinds, logits = [], torch.empty(rows, vocab)
    for row in range(rows):
        count = int(torch.randint(2, 12, (1,), generator=g))
        near = torch.randn(1, generator=g).view(torch.int32) + torch.randint(-300, 300, (count,), generator=g).int()
        tiny = torch.randn(count, generator=g) * 10.0 ** -torch.randint(0, 38, (count,), generator=g)
        far = torch.randn(count, generator=g) * 30
        mixed = torch.cat([near.view(torch.float32), tiny, far])
        values = (near.view(torch.float32), tiny, far, mixed)[row % 4]
        logits[row] = values[torch.randint(0, len(values), (vocab,), generator=g)]
        top_k, top_p = int(torch.randint(1, vocab, (1,), generator=g)), max(float(torch.rand(1, generator=g)), 1e-3)
        kinds.append(
            SamplingParams(
                top_k=0 if asked == "top-p" else top_k,
                top_p=1.0 if asked == "top-k" else top_p,
                temperature=(0.7, 1.0, 20.0)[row % 7 % 3],
            )
        )
        case.load(row, kinds[-1])
    case.run(logits, list(range(rows)), steps=("begin", "accept"))
    for row, params in enumerate(kinds):
        p = reference.probabilities(logits[row : row + 1], params)[0]
        assert torch.equal(kept_by_record(case, row, params, logits[row]), p > 0), (row, params)


def test_greedy_takes_the_lowest_of_equals(device):
    case = Case(device, 3, 256)
    target = torch.zeros(3, 6, 256)
    target[0, :, [17, 99, 200]] = 5.0
    target[1, :, 255] = 1.0
    for slot in range(3):
        case.load(slot, SamplingParams(temperature=0), logits=target[slot, :5].clone())
    found = case.run(rows_of(case, target, [0, 1, 2]), [0, 1, 2])
    assert [r.tokens for r in found] == [[17] * 6, [255] * 6, [0] * 6]


# --- laws ---


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_disjoint_q_is_never_accepted(device, rule):
    case = Case(device, 8, 64)
    g = generator(51)
    target, draft = torch.randn(8, 6, 64, generator=g), torch.randn(8, 5, 64, generator=g)
    target[..., 32:] = -3e4
    draft[..., :32] = -3e4
    for slot in range(8):
        case.load(slot, SamplingParams(), rule=rule, seed=slot, logits=draft[slot])
    slots = list(range(8))
    logits = rows_of(case, target, slots)
    found = case.run(logits, slots)
    assert found == case.expected(logits, slots)
    assert all(r.accepted == 0 and r.tokens[0] < 32 for r in found)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_equal_q_is_always_accepted(device, rule):
    case = Case(device, 8, 64)
    target = torch.randn(8, 6, 64, generator=generator(52))
    for slot in range(8):
        case.load(slot, SamplingParams(temperature=0.7), rule=rule, seed=slot, logits=target[slot, :5].clone())
    found = case.run(rows_of(case, target, list(range(8))), list(range(8)))
    assert all(r.accepted == 5 for r in found)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_law_of_the_first_tokens(device, rule):
    """Tokens 0 and 1, whenever they are delivered, follow p of their rows; filtered ones never come."""
    vocab, block, places = 16, 2, 32
    runs = 4 if jit.emulated(device) else 400
    params = SamplingParams(temperature=1.3, top_k=9, top_p=0.95)
    g = generator(53)
    rows, draft = 1.2 * torch.randn(3, vocab, generator=g), 1.2 * torch.randn(2, vocab, generator=g)
    p = reference.probabilities(rows, params)
    q = (draft.double() / params.temperature).softmax(-1)
    case = Case(device, places, vocab, block=block)
    for slot in range(places):
        case.load(slot, params, rule=rule, logits=draft)
    counts = torch.zeros(2, vocab, dtype=torch.int64)
    accepted = 0
    logits = rows.repeat(places, 1)
    state = case.state
    for run in range(runs):
        seeds = torch.arange(places) + run * places + 12345
        for i in range(block):
            noise = reference.uniform(seeds, torch.tensor(11), torch.tensor(11 + i), Purpose.DRAFT, vocab)
            ids = reference.sample(q[i].expand(places, -1), noise)
            state.tokens[:, 1 + i] = ids.int().to(device)
            state.draft_stats[:, i, 2] = draft[i, ids].to(device)
        state.seed.copy_(seeds)
        state.position.fill_(10)
        state.num_drafts.fill_(block)
        for record in case.run(logits, list(range(places))):
            accepted += record.accepted
            for i, token in enumerate(record.tokens[:2]):
                counts[i, token] += 1
    assert 0.2 < accepted / (runs * places) < 1.9
    for i in range(2):
        possible = p[i] > 0
        assert counts[i][~possible].sum() == 0
        expected = p[i][possible] * counts[i].sum()
        assert stats.chisquare(counts[i][possible].numpy(), expected.numpy()).pvalue > 1e-4
    wrong = q[0][p[0] > 0]  # the data can tell: it does not follow q
    assert stats.chisquare(counts[0][p[0] > 0].numpy(), (wrong / wrong.sum() * counts[0].sum()).numpy()).pvalue < 1e-6


# --- errors ---


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_row_fails_its_request_alone(device, value):
    case = Case(device, 8, 256)
    target = requests(case, PLAIN, 61, counts=[5] * 8)
    target[1, 0, 0] = value
    target[2, 5, 255] = value
    target[7, 3, 100] = value
    slots = list(range(8))
    logits = rows_of(case, target, slots)
    found = case.run(logits, slots)
    expected = case.expected(logits, slots)
    assert found == expected
    assert [r.failed for r in found] == [False, True, True, False, False, False, False, True]
    before = {slot: case.params[slot][4] for slot in slots}
    for slot, record in zip(slots, found, strict=True):
        assert int(case.state.position[slot]) == before[slot] + len(record.tokens)
    assert case.batches[0].draft_slot.view(8, 5)[:, 0].tolist() == [0, -1, -1, 3, 4, 5, 6, -1]
    # It rests until the host has looked; the others go on.
    again = case.run(logits, slots)
    assert [r.slot for r in again] == [0, -1, -1, 3, 4, 5, 6, -1]
    assert case.batches[0].row_slot.view(8, 6)[1].tolist() == [-1] * 6


def test_rows_beyond_the_drafts_are_never_looked_at(device):
    case = Case(device, 2, 256)
    target = requests(case, PLAIN[1:3], 62, counts=[2, 0])
    logits = rows_of(case, target, [0, 1])  # NaN there
    found = case.run(logits, [0, 1])
    assert found == case.expected(logits, [0, 1])
    assert not any(r.failed for r in found)


def test_an_empty_batch_reports_and_nothing_else(device):
    case = Case(device, 4, 256)
    found = case.run(torch.full((24, 256), math.nan), [-1] * 4)
    assert found == [Record(-1, [], 0, 0, False)] * 4
    batch = case.batches[0]
    for slots in (batch.row_slot, batch.committed_slot, batch.draft_slot):
        assert (slots == -1).all()


def test_what_is_not_served_is_refused(device):
    state = SlotState.allocate(1, BLOCK, 64, device)
    for params in (SamplingParams(presence_penalty=1.0), SamplingParams(logit_bias={1: 2.0})):
        with pytest.raises(ValueError, match="host's path"):
            state.load(0, position=0, token=0, seed=0, params=params)
    with pytest.raises(ValueError, match="multiple of 16"):
        cuda.constants(vocab_local=100, block=5, world=1, rows=6, places=1)
    with pytest.raises(ValueError, match="rows_per_request"):
        Batch.allocate(4, 7, BLOCK, device)
    batch, work = Batch.allocate(4, 6, BLOCK, device), Workspace.allocate(4, 6, BLOCK, 1, device)
    with pytest.raises(ValueError, match="logits"):
        cuda.accept(state, batch, work, torch.zeros(23, 64, device=device), block_rule=False, levels=0)
    with pytest.raises(ValueError, match="places"):
        cuda.commit(state, batch, work, Ring.allocate(2, 3, BLOCK, device), noise_token=0, max_model_len=9)


# --- steps ---


def test_fifty_steps_of_a_scripted_model(device):
    """Greedy requests follow a text known beforehand, whatever their drafts; they come, go, rest and end."""
    vocab, places, slots, length = 64, 3, 5, 50
    g = generator(71)
    texts = torch.randint(0, vocab, (slots, length + 10), generator=g)
    case = Case(device, places, vocab, slots=slots)
    state, batch = case.state, case.batches[0]
    delivered = {}
    for slot in range(slots):
        start = 1 + 3 * slot
        case.load(slot, SamplingParams(temperature=0), position=start, token=int(texts[slot, start]))
        delivered[slot] = start + 1  # tokens of the text that are known
    active = [0, 1, -1]
    for step in range(1, 51):
        if step % 7 == 0:  # another mix of slots
            active = [int(v) for v in torch.randperm(slots, generator=g)[:places]]
            active[step % places] = -1 if step % 2 else active[step % places]
        # Drafts: a right prefix of random length, then a wrong token, then anything.
        wanted = {}
        for slot in [s for s in active if s >= 0]:
            at, count = delivered[slot], int(torch.randint(0, BLOCK + 1, (1,), generator=g))
            right = int(torch.randint(0, count + 1, (1,), generator=g))
            drafts = texts[slot, at : at + count].clone()
            if right < count:
                drafts[right] = (drafts[right] + 1) % vocab
            count = min(count, max(0, length - at))
            state.tokens[slot, 1 : 1 + count] = drafts[:count].int().to(device)
            state.num_drafts[slot] = count
            ended = at >= length
            wanted[slot] = (0, 0) if ended else (min(right, count), count)
        logits = torch.full((places * 6, vocab), math.nan)
        for place, slot in enumerate(active):
            if slot >= 0 and delivered[slot] < length:
                for i in range(wanted[slot][1] + 1):
                    logits[place * 6 + i] = 0
                    logits[place * 6 + i, texts[slot, delivered[slot] + i]] = 4
        records = case.run(logits, active, max_model_len=length)
        assert case.rings[0].poll(step + 1, places) is None, "not reported yet"
        for place, (slot, record) in enumerate(zip(active, records, strict=True)):
            rows = batch.row_slot.view(places, 6)[place].tolist()
            draft_rows = slice(place * BLOCK, (place + 1) * BLOCK)
            if slot < 0 or delivered[slot] >= length:
                assert record == Record(-1, [], 0, 0, False)
                assert rows == [-1] * 6
                assert (batch.draft_slot[draft_rows] == -1).all()
                continue
            accepted, count = wanted[slot]
            at = delivered[slot]
            assert record == Record(slot, texts[slot, at : at + accepted + 1].tolist(), accepted, count, False)
            assert rows == [slot] * (count + 1) + [-1] * (5 - count)
            positions = batch.row_position.view(places, 6)[place].tolist()
            assert positions[: count + 1] == list(range(at - 1, at + count))
            assert int(batch.row_token.view(places, 6)[place, 0]) == int(texts[slot, at - 1])
            committed = batch.committed_slot.view(places, 6)[place].tolist()
            assert committed == [slot] * (accepted + 1) + [-1] * (5 - accepted)
            delivered[slot] = at = at + accepted + 1
            assert int(state.position[slot]) == at - 1
            assert int(state.tokens[slot, 0]) == int(texts[slot, at - 1])
            assert int(state.num_drafts[slot]) == 0
            if at >= length:
                assert (batch.draft_slot[draft_rows] == -1).all()
                continue
            assert batch.draft_token[draft_rows].tolist() == [int(texts[slot, at - 1])] + [NOISE] * 4
            assert batch.draft_position[draft_rows].tolist() == list(range(at - 1, at + 4))
            assert batch.draft_slot[draft_rows].tolist() == [slot] * 5
            assert batch.draft_last[draft_rows].tolist() == [at - 2] * 5
    assert max(delivered.values()) >= length, "some request must reach the end of its context"


def test_a_row_does_not_depend_on_the_others(device):
    """Alone and beside others, in another place: the same records bit for bit."""
    case = Case(device, 8, 512)
    target = requests(case, PLAIN[:4] + FILTERED[:4], 81, counts=[5] * 8)
    slots = list(range(8))
    case.run(rows_of(case, target, slots), slots, steps=("begin", "accept"))
    together = case.works[0].rows.clone().view(8, 6, 8)
    for slot in (1, 5, 7):
        alone = [-1] * 3 + [slot] + [-1] * 4
        case.run(rows_of(case, target, alone), alone, steps=("begin", "accept"))
        assert torch.equal(case.works[0].rows.view(8, 6, 8)[3], together[slot])
