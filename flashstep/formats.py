"""Number formats of the checkpoint and of the caches: fp8, fp4, UE8M0 scales, and every rounding rule.

Owns encode and decode, bit for bit, in PyTorch on any device (sections 2 and 3 of `docs/model.md`). Kernels are
compared with these functions; nothing else in the package rounds by a rule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK, KV_GROUP

FP8_MAX = 448.0  # largest finite e4m3
FP4_MAX = 6.0  # largest e2m1
UE8M0_NAN = 255
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 is the sign

# Upper ends of the intervals that round to codes 0..6. Ties go to the even code, so the intervals of codes 0, 2, 4
# and 6 own both their ends: an end that belongs to the code above is moved down by one float32.
_FP4_ENDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_FP4_ENDS[1::2] = torch.nextafter(_FP4_ENDS[1::2], torch.zeros(3))
_FP4_TABLE = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])


@dataclass(frozen=True)
class Numerics:
    """How the reference rounds: the dtype of activations between operations, and whether quantizers act.

    bfloat16 with quantizers is the model as published. float32 keeps activations and attention probabilities
    unrounded; without quantizers nothing is rounded but the stored weights, which leaves a function free of flips.
    """

    dtype: torch.dtype = torch.bfloat16
    quantize: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"activation dtype {self.dtype}: expected torch.bfloat16 or torch.float32")

    def fp8(self, x: Tensor) -> Tensor:
        """Round trip of `x` [..., columns] through fp8 with one power-of-two scale per 32 columns."""
        return fp8_round_trip(x) if self.quantize else x

    def kv_fp4(self, x: Tensor) -> Tensor:
        """Round trip of compressed KV [..., head_dim]: e2m1 with one E4M3 scale per 16 columns."""
        return fp4_round_trip(x, *fp4_e4m3_scale(x)) if self.quantize else x

    def index_fp4(self, x: Tensor) -> Tensor:
        """Round trip of index keys and queries [..., index_head_dim]: e2m1, power-of-two scale per 32 columns."""
        return fp4_round_trip(x, *fp4_ue8m0_scale(x)) if self.quantize else x


# -- UE8M0 ----------------------------------------------------------------------------------------------------------


def ue8m0_decode(codes: Tensor) -> Tensor:
    """2^(code - 127) in float32 for uint8 `codes`; code 255 becomes NaN, code 0 the subnormal 2^-127."""
    codes = codes.view(torch.uint8).to(torch.int32)
    bits = torch.where(codes == 0, 1 << 22, codes << 23)  # 2^-127 has no normal float32; 255 << 23 is infinity
    return torch.where(codes == UE8M0_NAN, float("nan"), bits.view(torch.float32))


def ue8m0_encode(scale: Tensor) -> Tensor:
    """Codes [..] uint8 of exact powers of two (float32). Raises ValueError on any other value."""
    mantissa, exponent = torch.frexp(scale)
    codes = exponent + 126
    if bool(((mantissa != 0.5) | (codes < 0) | (codes > 254)).any()):
        raise ValueError("UE8M0 scales must be powers of two between 2^-127 and 2^127")
    return codes.to(torch.uint8)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below `x` (positive normal float32), from its bits alone."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


# -- fp8 activations and window entries -----------------------------------------------------------------------------


def fp8_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., columns] float8_e4m3fn and scales [..., columns / 32] float32 of `x`.

    The scale is the power of two not below amax / 448, with amax at least 1e-4; values are divided by that very scale.
    """
    groups = _groups(x, FP8_BLOCK)
    scale = ceil_power_of_two(groups.abs().amax(-1).clamp_(min=1e-4).mul_(1 / FP8_MAX))
    scaled = (groups / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), scale


def fp8_round_trip(x: Tensor) -> Tensor:
    """`x` [..., columns] as fp8 holds it, in the dtype of `x` (bf16 holds every such value exactly)."""
    codes, scale = fp8_quantize(x)
    return (_groups(codes, FP8_BLOCK) * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


# -- fp4 cache entries ----------------------------------------------------------------------------------------------


def fp4_ue8m0_scale(x: Tensor) -> tuple[Tensor, int]:
    """Scales [..., columns / 32] float32 of index keys and queries, and the group size."""
    amax = _groups(x, FP8_BLOCK).abs().amax(-1).clamp(min=FP4_MAX * 2.0**-126)
    return ceil_power_of_two(amax * (1 / FP4_MAX)), FP8_BLOCK


def fp4_e4m3_scale(x: Tensor) -> tuple[Tensor, int]:
    """Scales [..., columns / 16] float32 of compressed KV, rounded to E4M3, and the group size."""
    amax = _groups(x, KV_GROUP).abs().amax(-1).clamp(min=FP4_MAX * 2.0**-9)
    return (amax / FP4_MAX).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float(), KV_GROUP


def fp4_quantize(x: Tensor, scale: Tensor, group: int) -> Tensor:
    """e2m1 codes [..., columns] uint8 of `x` under `scale` [..., columns / group]: nearest, ties to the even code."""
    scaled = _groups(x, group) / scale.unsqueeze(-1)
    codes = torch.bucketize(scaled.abs(), _FP4_ENDS.to(x.device))
    return (codes + 8 * torch.signbit(scaled)).to(torch.uint8).view(x.shape)


def fp4_round_trip(x: Tensor, scale: Tensor, group: int) -> Tensor:
    """`x` [..., columns] as e2m1 codes under `scale` hold it, in the dtype of `x`."""
    values = _FP4_TABLE.to(x.device)[fp4_quantize(x, scale, group).long()]
    return (_groups(values, group) * scale.unsqueeze(-1)).view(x.shape).to(x.dtype)


# -- weights --------------------------------------------------------------------------------------------------------


def fp4_unpack(packed: Tensor) -> Tensor:
    """Codes [..., 2 * bytes] uint8 of packed bytes [..., bytes]; the low nibble is the even column."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def fp4_pack(codes: Tensor) -> Tensor:
    """Packed bytes [..., columns / 2] int8 of e2m1 codes [..., columns] uint8; inverse of `fp4_unpack`."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def decode_fp4_weight(packed: Tensor, scale: Tensor) -> Tensor:
    """[rows, columns] float32 of packed e2m1 [rows, columns / 2] with UE8M0 `scale` [rows, columns / 32]."""
    values = _FP4_TABLE.to(packed.device)[fp4_unpack(packed).long()]
    return (_groups(values, FP8_BLOCK) * ue8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def encode_fp4_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed e2m1 [rows, columns / 2] int8 and UE8M0 codes [rows, columns / 32] uint8 of a float32 weight."""
    scale, group = fp4_ue8m0_scale(weight)
    return fp4_pack(fp4_quantize(weight, scale, group)), ue8m0_encode(scale)


def decode_fp8_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """[rows, columns] float32 of e4m3 [rows, columns] with UE8M0 `scale` [ceil(rows / 32), ceil(columns / 32)]."""
    return weight.float() * _spread(ue8m0_decode(scale), weight.shape)


def encode_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [rows, columns] and UE8M0 codes [ceil(rows / 32), ceil(columns / 32)] uint8 of a float32 weight."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    tiles = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    scale = ceil_power_of_two(tiles.abs().amax((1, 3)).clamp(min=1e-4) * (1 / FP8_MAX))
    scaled = (weight / _spread(scale, weight.shape)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn), ue8m0_encode(scale)


def decode_fp8_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """[..., columns] bf16 of fp8 rows (Engram tables, window entries), one UE8M0 scale per 32 columns; exact."""
    return (_groups(rows, FP8_BLOCK) * ue8m0_decode(scale).unsqueeze(-1)).flatten(-2).bfloat16()


def decode_fp4_entry(packed: Tensor, scale: Tensor) -> Tensor:
    """[..., columns] bf16 of a cache entry: packed e2m1 [..., columns / 2] and float32 `scale`, one per equal group."""
    values = _FP4_TABLE.to(packed.device)[fp4_unpack(packed).long()]
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2).bfloat16()


# -- helpers --------------------------------------------------------------------------------------------------------


def _groups(x: Tensor, group: int) -> Tensor:
    """float32 view [..., columns / group, group]."""
    return x.float().unflatten(-1, (-1, group))


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """One scale per element of `shape` [rows, columns] from one per 32 x 32 block."""
    spread = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return spread[: shape[0], : shape[1]]
