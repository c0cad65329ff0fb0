"""Compressor and indexer kernels against `reference.py`, on a GPU or the emulator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flashstep import jit
from flashstep.config import ModelConfig
from flashstep.formats import (
    Numerics,
    decode_fp4_entry,
    fp4_e4m3_scale,
    fp4_pack,
    fp4_quantize,
    fp4_ue8m0_scale,
    ue8m0_decode,
    ue8m0_encode,
)
from flashstep.ops import Linear, Rope, rotate
from flashstep.stages.indexer import cuda, reference
from flashstep.tiny import small_config

NUM = Numerics()
POISON = 0x7F
PLAIN, SOURCE, CONSUMER = 1, 3, 5  # index sources of the small configuration: ratio 2, then 1
PAGE_TOKENS = 16


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def config_of(**overrides: object) -> ModelConfig:
    """8 heads of 32 make the scale of the head weights 1/16: scores can be exact."""
    return ModelConfig.from_dict(small_config(**{"index_n_heads": 8, **overrides}))


RELEASED_SIZES = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "candidate_block_size": 8,
}


@dataclass
class Batch:
    """Rows of several requests; parts are (slot, first position, rows, how many of them are active)."""

    slots: Tensor
    positions: Tensor

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, int, int]]) -> Batch:
        slots, positions = [], []
        for slot, first, rows, active in parts:
            slots += [slot] * active + [-1] * (rows - active)
            positions += range(first, first + rows)
        return cls(torch.tensor(slots, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32))


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = torch.tensor([], dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * size), POISON, dtype=torch.uint8, device=device).view(dtype)


def poisoned_cache(
    config: ModelConfig,
    layer: int,
    slots: int,
    pages_per_slot: int,
    device: torch.device,
    page_tokens: int = PAGE_TOKENS,
) -> cuda.Cache:
    """Pages in random order, some of them nobody's."""
    per_page, pages = page_tokens // config.compress_ratios[layer], slots * pages_per_slot + 3
    widths = (config.head_dim // 2, config.head_dim // 16, config.index_head_dim // 2, config.index_head_dim // 32)
    table = torch.randperm(pages)[: slots * pages_per_slot].view(slots, pages_per_slot).int()
    tensors = [torch.full((pages, per_page, width), 0xFF, dtype=torch.uint8, device=device) for width in widths]
    return cuda.Cache(*tensors, table.to(device))


def place(cache: cuda.Cache, slot: int, entries: Tensor) -> tuple[Tensor, Tensor]:
    table = cache.page_table.cpu()
    return table[slot, entries // cache.entries_per_page].long(), entries % cache.entries_per_page


# ---- compress -------------------------------------------------------------------------------------------------------


class Compression:
    """A KV source that is run forward by forward, and what its caches must hold."""

    def __init__(self, config: ModelConfig, layer: int, slots: int, tokens: int, device: torch.device) -> None:
        self.config, self.layer, self.device = config, layer, device
        self.ratio = config.compress_ratios[layer]
        self.parts = 1 if self.ratio == 1 else 2
        self.rope = Rope(config, compressed=True)
        gate = None if self.ratio == 1 else Linear(torch.zeros(1))
        norm = (1 + 0.1 * torch.randn(config.head_dim)).bfloat16()
        self.compressor = reference.Compressor(Linear(torch.zeros(1)), gate, norm)
        self.wk = (torch.randn(config.index_head_dim, config.head_dim) * config.head_dim**-0.5).bfloat16()
        k_norm = (1 + 0.1 * torch.randn(config.index_head_dim)).bfloat16()
        self.index_key = reference.IndexKey(Linear(self.wk), k_norm)
        self.cache = poisoned_cache(config, layer, slots, -(-tokens // PAGE_TOKENS), device)
        self.ring_length = 18  # as the longest forward of these tests
        self.ring = poisoned(slots, self.ring_length, self.parts, config.head_dim, dtype=torch.float32, device=device)
        self.raw: dict[tuple[int, int], Tensor] = {}  # by slot and position
        self.entries: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by slot and entry: kv and key, decoded
        self.wanted_ring = self.ring.cpu().clone()

    def forward(self, batch: Batch) -> None:
        """Random products of the rows through the kernel and through the reference."""
        config, rows, width = self.config, len(batch.slots), self.parts * self.config.head_dim
        products = torch.randn(rows, width + 5) * 3
        column = 4  # the products stand among others
        products = torch.cat((products, torch.full((rows, 3), float("nan"))), dim=1)
        self.compress(batch, products, column)
        values = products[:, column : column + width].unflatten(1, (self.parts, -1))
        if self.ratio == 1:
            values = values.bfloat16().float()
        rows_of = list(zip(batch.slots.tolist(), batch.positions.tolist(), values, strict=True))
        for slot, position, value in rows_of:
            if slot >= 0:
                self.raw[slot, position] = value
                self.wanted_ring[slot, position % self.ring_length] = value
        for slot, position, _ in rows_of:
            if slot >= 0 and (position + 1) % self.ratio == 0:
                entry = position // self.ratio
                group = torch.stack([self.raw[slot, entry * self.ratio + i] for i in range(self.ratio)])
                latent = reference.pool(group.unsqueeze(0), self.compressor, config, NUM)
                turn = self.rope.at(torch.tensor([entry * self.ratio]))
                key = reference.index_key(latent, turn, self.index_key, config, NUM)
                self.entries[slot, entry] = (reference.kv_entry(latent, turn, NUM)[0], key[0])

    def compress(self, batch: Batch, products: Tensor, column: int) -> None:
        """The kernel; the products stand in `products` from `column` on."""
        raw = cuda.Product(products.to(self.device), column)
        for launch in cuda.compress(
            self.config,
            self.layer,
            row_position=batch.positions.to(self.device),
            row_slot=batch.slots.to(self.device),
            raw=raw,
            ring=self.ring,
            norm=self.compressor.norm.to(self.device),
            wk=cuda.pack_wk(self.wk).to(self.device),
            k_norm=self.index_key.k_norm.to(self.device),
            frequencies=self.rope.frequencies.to(self.device),
            cache=self.cache,
        ):
            launch()

    def check(self) -> None:
        """The rings are equal bit for bit, what was not written is untouched, entries and keys are the reference's.

        The reference rounds float64 values, the kernel float32 ones: about one bf16 rounding in ten thousand falls the
        other way, and few of those move an fp4 code, then by one step. Everything else is equal.
        """
        assert torch.equal(self.ring.cpu().view(torch.int32), self.wanted_ring.view(torch.int32))
        cache = self.cache
        wanted = [
            torch.full_like(t, 0xFF, device="cpu")
            for t in (cache.kv_codes, cache.kv_scales, cache.key_codes, cache.key_scales)
        ]
        for (slot, entry), (kv, key) in self.entries.items():
            page, offset = place(cache, slot, torch.tensor(entry))
            scale, group = fp4_e4m3_scale(kv)
            wanted[0][page, offset] = fp4_pack(fp4_quantize(kv, scale, group)).view(torch.uint8)
            wanted[1][page, offset] = scale.to(torch.float8_e4m3fn).view(torch.uint8)
            scale, group = fp4_ue8m0_scale(key)
            wanted[2][page, offset] = fp4_pack(fp4_quantize(key, scale, group)).view(torch.uint8)
            wanted[3][page, offset] = ue8m0_encode(scale)
        # A round trip whose largest code fell to 4 or less under a power-of-two scale may be encoded with half of it:
        # compare values.
        found = [t.cpu() for t in (cache.kv_codes, cache.kv_scales, cache.key_codes, cache.key_scales)]
        untouched = wanted[0] == 0xFF
        touched = torch.zeros(wanted[0].shape[:2], dtype=torch.bool)
        for slot, entry in self.entries:
            touched[place(cache, slot, torch.tensor(entry))] = True
        assert int(untouched.sum()) < untouched.numel()
        for f, w in zip(found, wanted, strict=True):
            assert torch.equal(f[~touched], w[~touched])
        self._compare(decode_kv(*found[:2])[touched], decode_kv(*wanted[:2])[touched])
        self._compare(decode_key(*found[2:])[touched], decode_key(*wanted[2:])[touched])

    @staticmethod
    def _compare(found: Tensor, wanted: Tensor) -> None:
        assert wanted.abs().amax() > 1
        off = found != wanted
        assert off.float().mean() <= 5e-4, f"{int(off.sum())} of {off.numel()} differ, first at {off.nonzero()[0]}"
        assert ((found - wanted).abs() <= 0.51 * wanted.abs().amax(-1, keepdim=True)).all()


def decode_kv(codes: Tensor, scales: Tensor) -> Tensor:
    return decode_fp4_entry(codes, scales.view(torch.float8_e4m3fn).float()).float()


def decode_key(codes: Tensor, scales: Tensor) -> Tensor:
    return decode_fp4_entry(codes, ue8m0_decode(scales)).float()


@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_compress_forward_by_forward(layer: int, device: torch.device) -> None:
    torch.manual_seed(layer)
    run = Compression(config_of(), layer, slots=3, tokens=64, device=device)
    for parts in (
        [(0, 0, 5, 5)],  # opens a group
        [(0, 5, 6, 6), (2, 0, 3, 3)],  # closes it; another request
        [(0, 8, 6, 6), (2, 3, 1, 1), (1, 0, 2, 0)],  # three rows were rejected; an inactive request
        [(0, 9, 6, 4), (2, 4, 6, 1)],  # five rejected; inactive rows
        [(0, 13, 1, 1), (1, 0, 17, 17), (2, 5, 4, 4)],  # over a page border, over several blocks of rows
        [(1, 17, 6, 6), (0, 14, 6, 6)],
        [(1, 18, 6, 6), (0, 15, 6, 6)],
        [(1, 21, 3, 3)],  # closes a group that the ring holds in its second turn
    ):
        run.forward(Batch.of(parts))
        run.check()
    assert len(run.entries) >= 20


def test_compress_four_tokens_to_an_entry(device: torch.device) -> None:
    torch.manual_seed(4)
    config = replace(config_of(), compress_ratios=(0, 4, 4, 1, 1, 1, 0, 0))
    run = Compression(config, PLAIN, slots=1, tokens=32, device=device)
    for parts in ([(0, 0, 6, 6)], [(0, 6, 5, 5)], [(0, 9, 6, 6)], [(0, 15, 1, 1)]):
        run.forward(Batch.of(parts))
        run.check()
    assert len(run.entries) == 4


@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_compress_at_released_sizes(layer: int, device: torch.device) -> None:
    torch.manual_seed(5)
    run = Compression(config_of(**RELEASED_SIZES), layer, slots=2, tokens=32, device=device)
    for parts in ([(0, 0, 3, 3), (1, 0, 6, 6)], [(0, 3, 6, 6)], [(0, 8, 1, 1)]):
        run.forward(Batch.of(parts))
        run.check()


def test_compress_extreme_values(device: torch.device) -> None:
    """Zero rows and tiny ones stay finite and exact; gates that are far apart pick one token."""
    torch.manual_seed(6)
    run = Compression(config_of(), PLAIN, slots=1, tokens=32, device=device)
    dim = run.config.head_dim
    k = torch.randn(4, dim) * torch.tensor([[0.0], [0.0], [1e-12], [1e4]])
    z = torch.tensor([[0.0], [0.0], [500.0], [-500.0]]).expand(4, dim)
    products = torch.cat((k, z), dim=1).contiguous()
    batch = Batch.of([(0, 0, 4, 4)])
    (launch,) = cuda.compress(
        run.config,
        PLAIN,
        row_position=batch.positions.to(device),
        row_slot=batch.slots.to(device),
        raw=cuda.Product(products.to(device)),
        ring=run.ring,
        norm=run.compressor.norm.to(device),
        wk=cuda.pack_wk(run.wk).to(device),
        k_norm=run.index_key.k_norm.to(device),
        frequencies=run.rope.frequencies.to(device),
        cache=run.cache,
    )
    launch()
    page, offset = place(run.cache, 0, torch.tensor([0, 1]))
    kv = decode_kv(run.cache.kv_codes.cpu()[page, offset], run.cache.kv_scales.cpu()[page, offset])
    latent = reference.pool(products.unflatten(1, (2, dim)).unflatten(0, (2, 2)), run.compressor, run.config, NUM)
    wanted = reference.kv_entry(latent, run.rope.at(torch.tensor([0, 2])), NUM).float()
    assert (kv[0] == 0).all()
    assert torch.equal(kv[1], wanted[1])


def test_wk_packing_is_a_permutation() -> None:
    weight = torch.randn(32, 64).bfloat16()
    packed = cuda.pack_wk(weight)
    assert torch.equal(cuda.unpack_wk(packed), weight)
    unit = packed[1, 2].view(32, 4, 2)  # lane, register, pair: a1 of lane 9 is row 8 + 9 / 4, columns 2 (9 % 4)
    assert torch.equal(unit[9, 1], weight[16 + 8 + 2, 32 + 2 : 32 + 4])


# ---- choose ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Index keys of every slot, queries and head weights of every row, and what a choice of them gave."""

    config: ModelConfig
    layer: int
    batch: Batch
    cache: cuda.Cache
    query: Tensor  # bf16 [rows, heads * dim]
    weights: Tensor  # float32 [rows, heads]
    frequencies: Tensor
    max_model_len: int
    device: torch.device
    geometry: cuda.Geometry | None = None
    wave_keys: int = cuda.WAVE_KEYS
    early: bool = False

    def run(self, candidates: Tensor | None = None, in_front: Sequence[jit.Launch] = ()) -> tuple[Tensor, Tensor]:
        """Chosen entries and candidate blocks, with the launches `in_front` directly before."""
        rows, config, device = len(self.batch.slots), self.config, self.device
        scratch = cuda.Scratch.allocate(config, rows, self.max_model_len, device, wave_keys=self.wave_keys)
        keys, block_keys = (
            torch.full((len(part) + 64,), POISON, dtype=torch.int32, device=device)
            for part in (scratch.keys, scratch.block_keys)
        )
        scratch = replace(scratch, keys=keys[:-64], block_keys=block_keys[:-64])
        for tensor in (scratch.keys, scratch.block_keys):
            tensor.view(torch.uint8).fill_(POISON)
        chosen = poisoned(rows, config.index_topk, dtype=torch.int32, device=device)
        if candidates is None:
            candidates = poisoned(rows, config.candidate_topk_blocks, dtype=torch.int32, device=device)
        query = torch.full((rows, self.query.shape[1] + 16), float("nan"), dtype=torch.bfloat16)
        query[:, 8:-8] = self.query
        weights = torch.full((rows, self.weights.shape[1] + 3), float("nan"))
        weights[:, 1:-2] = self.weights
        launches = cuda.choose(
            config,
            self.layer,
            row_position=self.batch.positions.to(device),
            row_slot=self.batch.slots.to(device),
            query=cuda.Product(query.to(device), 8),
            weights=cuda.Product(weights.to(device), 1),
            frequencies=self.frequencies.to(device),
            cache=self.cache,
            scratch=scratch,
            chosen=chosen,
            candidates=candidates,
            early=self.early,
            geometry=self.geometry,
        )
        for launch in (*in_front, *launches):
            launch()
        assert (keys[-64:] == POISON).all(), "scores behind the scratch"
        assert (block_keys[-64:] == POISON).all(), "block scores behind the scratch"
        return chosen.cpu(), candidates.cpu()

    def scores(self, row: int) -> tuple[Tensor, float]:
        """The reference's scores [visible] of a row, and the largest sum of absolute terms."""
        config, slot, position = self.config, int(self.batch.slots[row]), int(self.batch.positions[row])
        visible = (position + 1) // config.compress_ratios[self.layer]
        entries = torch.arange(visible)
        page, offset = place(self.cache, slot, entries)
        keys = decode_key(self.cache.key_codes.cpu()[page, offset], self.cache.key_scales.cpu()[page, offset])
        angles = (torch.tensor([[float(position)]]) * self.frequencies).double()
        turn = torch.polar(torch.ones_like(angles), angles)
        query = self.query[row].view(1, config.index_n_heads, config.index_head_dim)
        query = NUM.index_fp4(rotate(query, turn, NUM))
        # One factor, as exact as the sizes make it: two roots of powers of two are off their product by a unit, and a
        # sum that cancels is then 0 or 1e-17, as the order of the additions (BLAS) has it: no tie any more.
        weights = (
            self.weights[row : row + 1].bfloat16().double() * (config.index_head_dim * config.index_n_heads) ** -0.5
        )
        size = reference.score(query, weights.abs(), keys)
        return reference.score(query, weights, keys)[0], float(size.max()) if visible else 0.0

    def check(self, chosen: Tensor, lists: Tensor, *, exact: bool) -> None:
        """Each row against the reference: equal; if not `exact` (float32 sums), but for members that nearly tie."""
        config = self.config
        consumer, source = config.uses_candidates(self.layer), self.layer == config.candidate_source_layer_id
        for row, slot in enumerate(self.batch.slots.tolist()):
            if slot < 0:
                assert (chosen[row] == -1).all()
                continue
            scores, size = self.scores(row)
            visible, block = len(scores), config.candidate_block_size
            if source:
                wanted = reference.candidates(scores.unsqueeze(0), torch.tensor([visible]), config)[0]
                compare_lists(
                    lists[row], wanted[::block].nonzero()[:, 0], self._block_scores(scores), size, exact=exact
                )
            if consumer:
                kept = lists[row][lists[row] >= 0]
                inside = torch.zeros(-(-visible // block), dtype=torch.bool)
                inside[kept.long()] = True
                scores = scores.masked_fill(~inside.repeat_interleave(block)[:visible], float("-inf"))
            wanted = reference.choose(scores.unsqueeze(0), config.index_topk)[0]
            compare_lists(chosen[row], wanted[wanted >= 0], scores, size, exact=exact)

    def _block_scores(self, scores: Tensor) -> Tensor:
        block = self.config.candidate_block_size
        padded = torch.nn.functional.pad(scores, (0, -len(scores) % block), value=float("-inf"))
        return padded.view(-1, block).amax(-1)


def compare_lists(found: Tensor, wanted: Tensor, scores: Tensor, size: float, *, exact: bool) -> None:
    """`found` is ascending with -1 pads and holds `wanted`, but for members that tie with the border within 1e-5."""
    count = len(wanted)
    assert (found[count:] == -1).all(), f"{count} are wanted, found {found.tolist()}"
    found = found[:count]
    assert (found[1:] > found[:-1]).all(), found.tolist()
    if exact:
        assert torch.equal(found.long(), wanted), f"found {found.tolist()}, wanted {wanted.tolist()}"
        return
    if count == 0:
        return
    assert int(found[0]) >= 0
    assert int(found[-1]) < len(scores)
    differing = set(found.tolist()) ^ set(wanted.tolist())
    border = float(scores[wanted].min())
    for number in differing:
        assert abs(float(scores[number]) - border) <= 1e-5 * size, (number, float(scores[number]), border)


def random_case(
    layer: int,
    parts: Sequence[tuple[int, int, int, int]],
    device: torch.device,
    *,
    pages: int = 16,
    integers: bool = False,
    kind: type[Case] | None = None,
    **overrides: object,
) -> Case:
    """Keys up to the newest entry that a row may see, poison behind; `integers` makes scores exact and ties common."""
    config = config_of(**overrides)
    batch = Batch.of(parts)
    slots = max(int(batch.slots.max()), 0) + 1
    cache = poisoned_cache(config, layer, slots, pages, device)
    dim, heads, rows = config.index_head_dim, config.index_n_heads, len(batch.slots)
    for slot in range(slots):
        positions = batch.positions[batch.slots == slot]
        entries = torch.arange((int(positions.max()) + 1) // config.compress_ratios[layer] if len(positions) else 0)
        keys = torch.randn(len(entries), dim) * 2.0 ** torch.randint(-2, 3, (len(entries), 1))
        if integers:
            keys = torch.zeros(len(entries), dim)
            keys[:, ::8] = torch.randint(0, 3, (len(entries), dim // 8)).float()
            keys[:, 7::32] = 6.0  # so that the scale is 1 and every value a code
        write_keys(cache, slot, keys)
    query = torch.randn(rows, heads * dim).bfloat16()
    weights = torch.randn(rows, heads)
    frequencies = Rope(config, compressed=True).frequencies
    if integers:
        query = torch.randint(0, 2, (rows, heads * dim)).bfloat16()
        query[:, 7::32] = 6.0
        weights = torch.randint(-1, 3, (rows, heads)) * (1 + 2.0**-10 * torch.randint(-1, 2, (rows, heads)))
        frequencies = torch.zeros_like(frequencies)
    return (kind or Case)(config, layer, batch, cache, query, weights, frequencies, pages * PAGE_TOKENS, device)


def write_keys(cache: cuda.Cache, slot: int, keys: Tensor) -> None:
    page, offset = place(cache, slot, torch.arange(len(keys)))
    scale, group = fp4_ue8m0_scale(keys)
    device = cache.key_codes.device
    cache.key_codes[page, offset] = fp4_pack(fp4_quantize(keys, scale, group)).view(torch.uint8).to(device)
    cache.key_scales[page, offset] = ue8m0_encode(scale).to(device)


TOPK = 8


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("visible", [0, 1, TOPK - 1, TOPK, TOPK + 1, 31, 32, 33, 100])
def test_choice_of_all_entries(visible: int, integers: bool, device: torch.device) -> None:
    torch.manual_seed(visible)
    case = random_case(PLAIN, [(0, 2 * visible, 4, 3)], device, integers=integers)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=integers)


@pytest.mark.parametrize("integers", [False, True])
def test_choice_of_several_requests(integers: bool, device: torch.device) -> None:
    """Groups of 1 to 11 rows, an inactive request between others, contexts from nothing to several pages."""
    torch.manual_seed(11)
    parts = [(3, 150, 6, 6), (0, 0, 2, 2), (1, 90, 6, 0), (2, 40, 11, 11), (1, 14, 3, 2), (4, 200, 1, 1)]
    case = random_case(PLAIN, parts, device, integers=integers)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=integers)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("position", [0, 3, 4, 15, 16, 17, 18, 75, 200])
def test_candidates_and_their_consumer(position: int, integers: bool, device: torch.device) -> None:
    """4 blocks of 4 entries: less than visible, all, and more; rows of one request with different newest blocks."""
    torch.manual_seed(position)
    case = random_case(SOURCE, [(1, position, 6, 5), (0, 60, 2, 2)], device, integers=integers)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=integers)
    for row, slot in enumerate(case.batch.slots.tolist()):
        if slot >= 0:
            newest = int(case.batch.positions[row]) // 4
            assert int(lists[row][min(newest, 3)]) == newest
    consumer = replace(case, layer=CONSUMER, query=case.query.flip(1))
    chosen, after = consumer.run(lists.to(device))
    assert torch.equal(after, lists)
    consumer.check(chosen, lists, exact=integers)


def test_fewer_candidate_entries_than_the_choice_keeps(device: torch.device) -> None:
    torch.manual_seed(12)
    case = random_case(SOURCE, [(0, 70, 6, 6)], device, candidate_topk_blocks=2, index_topk=16)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)
    consumer = replace(case, layer=CONSUMER)
    chosen, _ = consumer.run(lists.to(device))
    consumer.check(chosen, lists, exact=False)
    assert (chosen[:, 8:] == -1).all()


def test_candidates_where_every_entry_is_chosen(device: torch.device) -> None:
    """The choice needs no scores, the candidate blocks do."""
    torch.manual_seed(13)
    case = random_case(SOURCE, [(0, 50, 6, 6)], device, index_topk=64)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)


@pytest.mark.parametrize("values", [1, 2])
@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_ties(layer: int, values: int, device: torch.device) -> None:
    """One score, or two, for all entries: the lowest entries win, every time and on every path."""
    torch.manual_seed(values)
    ratio = 2 if layer == PLAIN else 1
    base = random_case(layer, [(0, 150 * ratio, 3, 3)], device, integers=True, pages=24)
    kinds = torch.randint(0, values, (160,)) if values > 1 else torch.zeros(160, dtype=torch.int64)
    kinds[:5] = 0
    dim = base.config.index_head_dim
    keys = torch.zeros(160, dim)
    keys[:, ::32] = 6.0
    keys[kinds == 1, 0] = 3.0
    base.weights = torch.ones_like(base.weights)
    write_keys(base.cache, 0, keys)
    results = []
    repetitions = 2 if jit.emulated(device) else 100
    for geometry in (None, cuda.Geometry(8, 4, 256, 2, 2)):
        case = replace(base, geometry=geometry)
        for _ in range(repetitions):
            chosen, lists = case.run()
            case.check(chosen, lists, exact=True)
            results.append((chosen, lists))
    for chosen, lists in results:
        assert torch.equal(chosen, results[0][0])
        if layer == SOURCE:
            assert torch.equal(lists, results[0][1])


GEOMETRIES = [
    cuda.Geometry(3, 1, 128, 1, 1),  # keys in several batches, one block
    cuda.Geometry(16, 2, 128, 4, 4),  # four blocks, keys in registers
    cuda.Geometry(16, 2, 128, 1, 2),  # two blocks, several batches
    cuda.Geometry(5, 4, 256, 1, 8),
]


@pytest.mark.parametrize(("geometry", "integers"), list(itertools.product(GEOMETRIES, [False, True])))
def test_long_contexts(geometry: cuda.Geometry, integers: bool, device: torch.device) -> None:
    """1,400 entries and 350 blocks: the selection over several batches of keys and several blocks of a cluster."""
    torch.manual_seed(17)
    case = random_case(
        SOURCE,
        [(0, 1400, 2, 2)],
        device,
        pages=90,
        integers=integers,
        index_topk=64,
        candidate_topk_blocks=140,
        max_position_embeddings=2048,
    )
    case.geometry = geometry
    chosen, lists = case.run()
    case.check(chosen, lists, exact=integers)
    consumer = replace(case, layer=CONSUMER)
    chosen, _ = consumer.run(lists.to(device))
    consumer.check(chosen, lists, exact=integers)


@pytest.mark.parametrize("wave_keys", [32, 256, 1024])
def test_waves_and_neighbours_change_nothing(wave_keys: int, device: torch.device) -> None:
    """A scratch for a part of the rows at a time gives the bits of one for all; so does each request alone."""
    torch.manual_seed(19)
    parts = [(0, 230, 6, 6), (1, 60, 2, 2), (2, 199, 3, 2), (3, 120, 1, 1)]
    for layer in (PLAIN, SOURCE):
        case = random_case(layer, parts, device)
        chosen, lists = case.run()
        case.check(chosen, lists, exact=False)
        split = replace(case, wave_keys=wave_keys)
        scratch = cuda.Scratch.allocate(case.config, 12, case.max_model_len, device, wave_keys=wave_keys)
        assert cuda.waves(case.config, layer, 12, scratch) > 1
        again, again_lists = split.run()
        assert torch.equal(chosen, again)
        first = 0
        for slot, start, rows, active in parts:
            rows_of = slice(first, first + rows)
            alone = replace(
                case,
                batch=Batch.of([(slot, start, rows, active)]),
                query=case.query[rows_of],
                weights=case.weights[rows_of],
            )
            alone_chosen, alone_lists = alone.run()
            assert torch.equal(alone_chosen, chosen[rows_of])
            if layer == SOURCE:
                assert torch.equal(alone_lists, lists[rows_of])
            first += rows
        if layer == SOURCE:
            assert torch.equal(lists, again_lists)


@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_reading_early_changes_nothing(layer: int, device: torch.device) -> None:
    """Tiles with and without entries of this forward; a request's rows in several groups; little and much to score."""
    torch.manual_seed(31)
    for parts in (
        [(0, 230, 6, 6), (1, 60, 2, 2), (2, 199, 11, 10), (3, 0, 4, 4)],
        [(0, 125, 3, 3)],
        [(0, 64, 1, 1), (1, 30, 2, 0)],
    ):
        case = random_case(layer, parts, device)
        chosen, lists = case.run()
        case.check(chosen, lists, exact=False)
        early_chosen, early_lists = replace(case, early=True).run()
        assert torch.equal(chosen, early_chosen)
        if layer == SOURCE:
            assert torch.equal(lists, early_lists)
            consumer = replace(case, layer=CONSUMER)
            chosen, _ = consumer.run(lists.to(device))
            early_chosen, _ = replace(consumer, early=True).run(lists.to(device))
            assert torch.equal(chosen, early_chosen)


def test_keys_of_this_forward_are_seen(device: torch.device) -> None:
    """`compress` in front writes them: read before it has ended, they would be zeros, below all others (on a GPU)."""
    torch.manual_seed(37)
    case = random_case(PLAIN, [(0, 90, 12, 12)], device)
    run = Compression(case.config, PLAIN, slots=1, tokens=16 * PAGE_TOKENS, device=device)
    raw = torch.randn(12, run.parts * case.config.head_dim, device=device)
    place_of = place(case.cache, 0, torch.arange(45, 51))
    compress = cuda.compress(
        case.config,
        PLAIN,
        row_position=case.batch.positions.to(device),
        row_slot=case.batch.slots.to(device),
        raw=cuda.Product(raw),
        ring=run.ring,
        norm=run.compressor.norm.to(device),
        wk=cuda.pack_wk(run.wk).to(device),
        k_norm=run.index_key.k_norm.to(device),
        frequencies=run.rope.frequencies.to(device),
        cache=case.cache,
        early=True,
    )
    wanted, _ = case.run(in_front=compress)
    for _ in range(2 if jit.emulated(device) else 100):
        case.cache.key_codes[place_of] = 0
        found, _ = replace(case, early=True).run(in_front=compress)
        assert torch.equal(found, wanted)


def test_released_sizes(device: torch.device) -> None:
    """32 heads of 128 columns, four scales a key, blocks of 8."""
    torch.manual_seed(23)
    case = random_case(SOURCE, [(0, 90, 3, 3), (1, 40, 6, 6)], device, **RELEASED_SIZES)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)
    consumer = replace(case, layer=CONSUMER)
    chosen, _ = consumer.run(lists.to(device))
    consumer.check(chosen, lists, exact=False)


def test_scales_far_apart(device: torch.device) -> None:
    """Keys and queries of magnitude 2^-20 to 2^20, negative scores, zero keys: no overflow, no lost scale."""
    torch.manual_seed(29)
    case = random_case(PLAIN, [(0, 180, 4, 4)], device)
    keys = torch.randn(92, 32) * 2.0 ** torch.randint(-20, 21, (92, 1))
    keys[7] = 0.0
    write_keys(case.cache, 0, keys)
    case.query = (case.query.float() * 2.0 ** torch.randint(-20, 21, (4, 1))).bfloat16()
    case.weights = -case.weights.abs()
    case.weights[1] = 0.0  # every score is 0, or minus 0
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)
    assert chosen[1].tolist() == list(range(TOPK))


def test_negative_zero_is_zero(device: torch.device) -> None:
    """Products too small for float32 with a negative weight are minus 0, which ties with 0."""
    case = random_case(PLAIN, [(0, 99, 1, 1)], device)
    keys = torch.zeros(50, 32)
    keys[::2] = 2.0**-60
    write_keys(case.cache, 0, keys)
    case.query = torch.full_like(case.query, 2.0**-60)
    case.weights = torch.full_like(case.weights, -(2.0**-60))
    chosen, _ = case.run()
    assert chosen[0].tolist() == list(range(TOPK))


def test_wrong_arguments_are_named(device: torch.device) -> None:
    case = random_case(SOURCE, [(0, 20, 1, 1)], device)
    scratch = cuda.Scratch.allocate(case.config, 1, 256, device)
    arguments = {
        "row_position": case.batch.positions.to(device),
        "row_slot": case.batch.slots.to(device),
        "query": cuda.Product(case.query.to(device)),
        "weights": cuda.Product(case.weights.to(device), 1),
        "frequencies": case.frequencies.to(device),
        "cache": case.cache,
        "scratch": scratch,
        "chosen": torch.empty(1, 7, dtype=torch.int32, device=device),
    }
    with pytest.raises(ValueError, match=r"weights: columns 1..8 of 8; chosen: shape .*; candidates: missing"):
        cuda.choose(case.config, SOURCE, **arguments)
    with pytest.raises(ValueError, match="at most 256"):
        cuda.Scratch.allocate(case.config, 257, 256, device)
