"""The boundary's Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics, fp8_quantize, ue8m0_encode
from flashstep.loading import BUNDLED_MODEL
from flashstep.ops import rms_norm
from flashstep.stages.boundary import portable, reference
from flashstep.stages.boundary.cuda import pack_fn

NUM = Numerics()
CONFIG = ModelConfig.from_file(BUNDLED_MODEL)
OTHER = replace(CONFIG, hidden_size=320, hc_sinkhorn_iters=3, rms_norm_eps=1e-6)  # 5 chunks of 64 columns


def draws(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@pytest.fixture(params=[CONFIG, OTHER], ids=["bundled", "other"])
def config(request) -> ModelConfig:
    return request.param


class Case:
    """Random weights, stream and a sublayer's output."""

    def __init__(self, config: ModelConfig, rows: int, device: torch.device) -> None:
        random = draws(rows, device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device)

        hc, hidden = config.hc_mult, config.hidden_size
        columns, count = hc * hidden, (2 + hc) * hc
        sizes = 4.0 ** (torch.arange(rows, device=device) % 7 - 3)  # some rows small, some large
        self.stream = (normal(rows, hc, hidden) * sizes[:, None, None]).bfloat16()
        self.output = normal(rows, hidden) * sizes[:, None]
        self.fn, self.base, self.scale = normal(count, columns) * columns**-0.5, normal(count) * 0.5, normal(3) + 1
        self.norm = (1 + 0.1 * normal(hidden)).bfloat16()
        self.mixes = portable.mixes(self.stream, pack_fn(self.fn), self.base, self.scale, config)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = self.mixes.double().split((4, 4, 16), dim=1)
        return pre, post, comb.unflatten(1, (4, 4))


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_mixes(config, rows, device):
    case = Case(config, rows, device)
    weights = reference.Weights(case.fn.double(), case.base.double(), case.scale.double())
    pre, post, comb = reference.mixes(case.stream, weights, config)
    wanted = torch.cat((pre, post, comb.flatten(1)), dim=1)
    assert (case.mixes - wanted).abs().max() < 4e-6  # float32 sums of 1,024 products
    assert (wanted[:, 8:] - 0.25).abs().max() > 0.05  # Sinkhorn had something to do


def test_a_row_of_zeros_has_finite_mixes(device):
    case = Case(CONFIG, 2, device)
    case.stream[1] = 0
    found = portable.mixes(case.stream, pack_fn(case.fn), case.base, case.scale, CONFIG)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_boundary(config, rows, device):
    case = Case(config, rows, device)
    hidden = config.hidden_size
    taps = torch.full((rows, 3 * hidden), torch.nan, device=device, dtype=torch.bfloat16)
    before = case.stream.clone()
    stream, x = portable.boundary(
        case.stream,
        portable.Sublayer(case.output, case.mixes),
        portable.Collapse(case.mixes, case.norm),
        config,
        portable.Taps(taps, hidden),
    )
    assert torch.equal(case.stream, before)
    pre, post, comb = case.split()
    close(stream, reference.expand(case.output.bfloat16(), case.stream, post, comb, NUM))
    close(x.collapsed, reference.collapse(stream, pre, NUM))
    close(x.values, rms_norm(x.collapsed, case.norm, config.rms_norm_eps, NUM))
    codes, scales = fp8_quantize(x.values)
    assert torch.equal(x.codes, codes.view(torch.uint8))
    assert torch.equal(x.scales, ue8m0_encode(scales))
    close(taps[:, hidden : 2 * hidden], stream.double().mean(1).bfloat16())
    assert taps[:, :hidden].isnan().all()
    assert taps[:, 2 * hidden :].isnan().all()


def close(got: Tensor, wanted: Tensor) -> None:
    """Equal, but for values in 1,000 that float32 puts on the other side of a rounding to bf16."""
    assert got.dtype == wanted.dtype == torch.bfloat16
    step = (got.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    # Sums that nearly cancel may differ by more of their own steps, but not by more than the terms' rounding.
    far = (got.float() - wanted.float()).abs() > 2.0**-20 * wanted.float().abs().amax(-1, keepdim=True)
    assert not (far & (step > 1)).any()
    assert (step > 0).float().mean() < 0.004


def test_halves_make_the_whole(device):
    case = Case(CONFIG, 6, device)
    sublayer, into = portable.Sublayer(case.output, case.mixes), portable.Collapse(case.mixes, case.norm)
    stream, x = portable.boundary(case.stream, sublayer, into, CONFIG)
    half = portable.expand(case.stream, sublayer, CONFIG)
    assert torch.equal(half, stream)
    assert torch.equal(portable.collapse(half, into, CONFIG).values, x.values)


def test_the_stream_begins_with_the_embedding_in_every_copy(device):
    embedding = torch.randn(50, CONFIG.hidden_size, device=device).bfloat16()
    stream = portable.embed(torch.tensor([7, 49], device=device), embedding, CONFIG)
    assert stream.shape == (2, 4, CONFIG.hidden_size)
    assert torch.equal(stream, embedding[[7, 49]].unsqueeze(1).expand(-1, 4, -1))
    stream[:, 1:] = torch.nan  # the first collapse takes copy 0 alone
    stream[:, 1:] = 99.0
    norm = torch.ones(CONFIG.hidden_size, device=device).bfloat16()
    assert torch.equal(portable.collapse(stream, portable.Collapse(None, norm), CONFIG).collapsed, stream[:, 0])


def test_rows_do_not_depend_on_their_company(device):
    case = Case(CONFIG, 40, device)
    alone = portable.mixes(case.stream[3:5].contiguous(), pack_fn(case.fn), case.base, case.scale, CONFIG)
    assert torch.equal(alone, case.mixes[3:5])
