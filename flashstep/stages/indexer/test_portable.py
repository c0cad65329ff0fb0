"""The Triton compressor and indexer against `reference.py`, on the GPU if there is one, else in Triton's interpreter.

Cases, expectations and bounds are those of `test_cuda`: both backends promise the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flashstep.stages.attention import portable as attention
from flashstep.stages.indexer import portable, test_cuda
from flashstep.stages.indexer.test_cuda import (
    CONSUMER,
    PLAIN,
    RELEASED_SIZES,
    SOURCE,
    TOPK,
    Batch,
    Case,
    Compression,
    config_of,
    random_case,
    write_keys,
)

_one_thread = test_cuda._one_thread


def batch_of(batch: Batch, device: torch.device) -> attention.Batch:
    return attention.Batch.of(batch.positions.to(device), batch.slots.to(device))


# ---- compress -------------------------------------------------------------------------------------------------------


class PortableCompression(Compression):
    def compress(self, batch: Batch, products: Tensor, column: int) -> None:
        portable.compress(
            self.config,
            self.layer,
            batch=batch_of(batch, self.device),
            raw=products.to(self.device)[:, column : column + self.parts * self.config.head_dim],
            ring=self.ring,
            norm=self.compressor.norm.to(self.device),
            wk=self.wk.to(self.device),
            k_norm=self.index_key.k_norm.to(self.device),
            frequencies=self.rope.frequencies.to(self.device),
            cache=self.cache,
        )


@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_compress_forward_by_forward(layer: int, device: torch.device) -> None:
    torch.manual_seed(layer)
    run = PortableCompression(config_of(), layer, slots=3, tokens=64, device=device)
    for parts in (
        [(0, 0, 5, 5)],  # opens a group
        [(0, 5, 6, 6), (2, 0, 3, 3)],  # closes it; another request
        [(0, 8, 6, 6), (2, 3, 1, 1), (1, 0, 2, 0)],  # three rows were rejected; an inactive request
        [(0, 9, 6, 4), (2, 4, 6, 1)],  # five rejected; inactive rows
        [(0, 13, 1, 1), (1, 0, 17, 17), (2, 5, 4, 4)],  # over a page border, over several blocks of rows
        [(1, 17, 6, 6), (0, 14, 6, 6)],
        [(1, 18, 41, 41), (0, 15, 6, 6)],  # longer than the ring
        [(1, 59, 3, 3)],  # closes a group that the ring holds in a later turn
    ):
        run.forward(Batch.of(parts))
        run.check()
    assert len(run.entries) >= 35


def test_a_chunk_that_takes_the_place_of_its_open_group(device: torch.device) -> None:
    """The group's first position is read from the ring before the chunk's own rows displace it."""
    torch.manual_seed(3)
    run = PortableCompression(config_of(), PLAIN, slots=1, tokens=64, device=device)
    run.forward(Batch.of([(0, 0, 5, 5)]))
    run.forward(Batch.of([(0, 5, 40, 40)]))
    run.check()


def test_compress_four_tokens_to_an_entry(device: torch.device) -> None:
    torch.manual_seed(4)
    config = replace(config_of(), compress_ratios=(0, 4, 4, 1, 1, 1, 0, 0))
    run = PortableCompression(config, PLAIN, slots=1, tokens=32, device=device)
    for parts in ([(0, 0, 6, 6)], [(0, 6, 5, 5)], [(0, 9, 6, 6)], [(0, 15, 1, 1)]):
        run.forward(Batch.of(parts))
        run.check()
    assert len(run.entries) == 4


@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_compress_at_released_sizes(layer: int, device: torch.device) -> None:
    torch.manual_seed(5)
    run = PortableCompression(config_of(**RELEASED_SIZES), layer, slots=2, tokens=32, device=device)
    for parts in ([(0, 0, 3, 3), (1, 0, 6, 6)], [(0, 3, 6, 6)], [(0, 8, 1, 1)]):
        run.forward(Batch.of(parts))
        run.check()


def test_compress_extreme_values(device: torch.device) -> None:
    """Zero rows and tiny ones stay finite and exact; gates that are far apart pick one token."""
    torch.manual_seed(6)
    run = PortableCompression(config_of(), PLAIN, slots=1, tokens=32, device=device)
    dim = run.config.head_dim
    k = torch.randn(4, dim) * torch.tensor([[0.0], [0.0], [1e-12], [1e4]])
    z = torch.tensor([[0.0], [0.0], [500.0], [-500.0]]).expand(4, dim)
    products = torch.cat((k, z), dim=1).contiguous()
    run.compress(Batch.of([(0, 0, 4, 4)]), products, 0)
    page, offset = test_cuda.place(run.cache, 0, torch.tensor([0, 1]))
    kv = test_cuda.decode_kv(run.cache.kv_codes.cpu()[page, offset], run.cache.kv_scales.cpu()[page, offset])
    latent = test_cuda.reference.pool(
        products.unflatten(1, (2, dim)).unflatten(0, (2, 2)), run.compressor, run.config, test_cuda.NUM
    )
    turn = run.rope.at(torch.tensor([0, 2]))
    wanted = test_cuda.reference.kv_entry(latent, turn, test_cuda.NUM).float()
    assert (kv[0] == 0).all()
    assert torch.equal(kv[1], wanted[1])


# ---- choose ---------------------------------------------------------------------------------------------------------


@dataclass
class PortableCase(Case):
    score_bytes: int = portable.SCORE_BYTES

    def run(self, candidates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, config, device = len(self.batch.slots), self.config, self.device
        query = torch.full((rows, self.query.shape[1] + 16), float("nan"), dtype=torch.bfloat16, device=device)
        query[:, 8:-8] = self.query.to(device)
        weights = torch.full((rows, self.weights.shape[1] + 3), float("nan"), device=device)
        weights[:, 1:-2] = self.weights.to(device)
        batch = batch_of(self.batch, device)
        turn = attention.turns(batch.positions, self.frequencies.to(device))
        chosen, lists = portable.choose(
            config,
            self.layer,
            batch=batch,
            query=portable.queries(config, query[:, 8:-8], weights[:, 1:-2], turn),
            cache=self.cache,
            longest=int(self.batch.positions.max()) + 1,
            candidates=candidates,
            score_bytes=self.score_bytes,
        )
        if lists is None:
            lists = torch.full((rows, config.candidate_topk_blocks), -1, dtype=torch.int32)
        return chosen.cpu(), lists.cpu()


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("visible", [0, 1, TOPK - 1, TOPK, TOPK + 1, 31, 32, 33, 100])
def test_choice_of_all_entries(visible: int, integers: bool, device: torch.device) -> None:
    torch.manual_seed(visible)
    case = random_case(PLAIN, [(0, 2 * visible, 4, 3)], device, integers=integers, kind=PortableCase)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=integers)


@pytest.mark.parametrize("integers", [False, True])
def test_choice_of_several_requests(integers: bool, device: torch.device) -> None:
    """Groups of 1 to 11 rows, an inactive request between others, contexts from nothing to several pages."""
    torch.manual_seed(11)
    parts = [(3, 150, 6, 6), (0, 0, 2, 2), (1, 90, 6, 0), (2, 40, 11, 11), (1, 14, 3, 2), (4, 200, 1, 1)]
    case = random_case(PLAIN, parts, device, integers=integers, kind=PortableCase)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=integers)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("position", [0, 3, 4, 15, 16, 17, 18, 75, 200])
def test_candidates_and_their_consumer(position: int, integers: bool, device: torch.device) -> None:
    """4 blocks of 4 entries: less than visible, all, and more; rows of one request with different newest blocks."""
    torch.manual_seed(position)
    parts = [(1, position, 6, 5), (0, min(position, 60), 2, 2)]
    case = random_case(SOURCE, parts, device, integers=integers, kind=PortableCase)
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
    case = random_case(SOURCE, [(0, 70, 6, 6)], device, candidate_topk_blocks=2, index_topk=16, kind=PortableCase)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)
    consumer = replace(case, layer=CONSUMER)
    chosen, _ = consumer.run(lists.to(device))
    consumer.check(chosen, lists, exact=False)
    assert (chosen[:, 8:] == -1).all()


def test_candidates_where_every_entry_is_chosen(device: torch.device) -> None:
    torch.manual_seed(13)
    case = random_case(SOURCE, [(0, 50, 6, 6)], device, index_topk=64, kind=PortableCase)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)


@pytest.mark.parametrize("values", [1, 2])
@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_ties(layer: int, values: int, device: torch.device) -> None:
    """One score, or two, for all entries: the lowest entries win."""
    torch.manual_seed(values)
    ratio = 2 if layer == PLAIN else 1
    case = random_case(layer, [(0, 150 * ratio, 3, 3)], device, integers=True, pages=24, kind=PortableCase)
    kinds = torch.randint(0, values, (160,)) if values > 1 else torch.zeros(160, dtype=torch.int64)
    kinds[:5] = 0
    dim = case.config.index_head_dim
    keys = torch.zeros(160, dim)
    keys[:, ::32] = 6.0
    keys[kinds == 1, 0] = 3.0
    case.weights = torch.ones_like(case.weights)
    write_keys(case.cache, 0, keys)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=True)


@pytest.mark.parametrize("integers", [False, True])
def test_long_contexts(integers: bool, device: torch.device) -> None:
    """1,400 entries and 350 blocks: the selection over several tiles."""
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
        kind=PortableCase,
    )
    chosen, lists = case.run()
    case.check(chosen, lists, exact=integers)
    consumer = replace(case, layer=CONSUMER)
    chosen, _ = consumer.run(lists.to(device))
    consumer.check(chosen, lists, exact=integers)


@pytest.mark.parametrize("layer", [PLAIN, SOURCE])
def test_parts_and_neighbours_change_nothing(layer: int, device: torch.device) -> None:
    """Scores for a part of the rows at a time give the bits of those for all; so does a request alone."""
    torch.manual_seed(19)
    case = random_case(layer, [(0, 150, 4, 4), (1, 60, 2, 2), (2, 139, 3, 2), (3, 99, 1, 1)], device, kind=PortableCase)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)
    for score_bytes in (1, 5000):
        again, again_lists = replace(case, score_bytes=score_bytes).run()
        assert torch.equal(chosen, again)
        assert torch.equal(lists, again_lists)
    batch = Batch.of([(2, 139, 3, 2)])
    alone = replace(case, batch=batch, query=case.query[6:9], weights=case.weights[6:9])
    alone_chosen, alone_lists = alone.run()
    assert torch.equal(alone_chosen, chosen[6:9])
    assert torch.equal(alone_lists, lists[6:9])


def test_released_sizes(device: torch.device) -> None:
    """32 heads of 128 columns, four scales a key, blocks of 8."""
    torch.manual_seed(23)
    case = random_case(SOURCE, [(0, 90, 3, 3), (1, 40, 6, 6)], device, kind=PortableCase, **RELEASED_SIZES)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)
    consumer = replace(case, layer=CONSUMER)
    chosen, _ = consumer.run(lists.to(device))
    consumer.check(chosen, lists, exact=False)


def test_scales_far_apart(device: torch.device) -> None:
    """Keys and queries of magnitude 2^-20 to 2^20, negative scores, zero keys: no overflow, no lost scale."""
    torch.manual_seed(29)
    case = random_case(PLAIN, [(0, 180, 4, 4)], device, kind=PortableCase)
    keys = torch.randn(92, 32) * 2.0 ** torch.randint(-20, 21, (92, 1))
    keys[7] = 0.0
    write_keys(case.cache, 0, keys)
    case.query = (case.query.float() * 2.0 ** torch.randint(-20, 21, (4, 1))).bfloat16()
    case.weights = -case.weights.abs()
    case.weights[1] = 0.0  # every score is 0, or minus 0
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)
    assert chosen[1].tolist() == list(range(TOPK))


def test_heads_that_are_no_power_of_two(device: torch.device) -> None:
    torch.manual_seed(31)
    case = random_case(PLAIN, [(0, 60, 5, 5)], device, index_n_heads=6, kind=PortableCase)
    chosen, lists = case.run()
    case.check(chosen, lists, exact=False)


def test_no_rows(device: torch.device) -> None:
    case = random_case(SOURCE, [(0, 60, 1, 1)], device, kind=PortableCase)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    chosen, lists = portable.choose(
        case.config,
        SOURCE,
        batch=attention.Batch.of(none, none),
        query=portable.Queries(torch.zeros(0, 8, 32, device=device).bfloat16(), torch.zeros(0, 8, device=device)),
        cache=case.cache,
        longest=0,
    )
    assert chosen.shape == (0, 8)
    assert lists is not None
    assert lists.shape == (0, 4)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    case = random_case(SOURCE, [(0, 20, 1, 1)], device, kind=PortableCase)
    with pytest.raises(ValueError, match="chooses inside the blocks of layer 3"):
        replace(case, layer=CONSUMER).run()
    turn = torch.zeros(1, 16, 2)
    with pytest.raises(ValueError, match=r"weights has the shape \(1, 7\): expected \(1, 8\)"):
        portable.queries(case.config, case.query, case.weights[:, :7], turn)
