"""Quantisation to float8 e4m3fn (arXiv:2209.05433) and to 4-bit e2m1 (OCP MX 1.0, 2023), correctly rounded."""

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0  # the largest finite value of e4m3fn

E2M1_MAX = 6.0  # the largest value of e2m1

BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Elements that are converted at a time: a CPU's cache holds the steps between, and a GPU has enough to do."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_SIGN = 8
_FLOAT64_BITS, _FLOAT64_BIAS = 52, 1023
_MANTISSA_BITS = 3
_EXPONENT_BITS = 0x7FF << _FLOAT64_BITS
_LEAST_EXPONENT = (_FLOAT64_BIAS - 6) << _FLOAT64_BITS
_SHIFTED = (_FLOAT64_BITS - _MANTISSA_BITS) << _FLOAT64_BITS
_HALF = 1 << (_FLOAT64_BITS - 1)
_NAN_MAGNITUDE = 0x7F


def quantize_e4m3(x: Tensor, scale: float) -> Tensor:
    """The e4m3 codes of x / scale: the quotient in float64, rounded once to nearest-even, saturated; NaN stays NaN."""
    _require_scale(scale)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    size = BLOCK_ELEMENTS[x.device.type]
    for values, code in zip(x.reshape(-1).split(size), codes.view(-1).split(size), strict=True):
        # torch's own cast goes through float32 and so rounds twice: 1 + 2^-4 + 2^-30 would become 1.0, not 1.125.
        # Beside 1.5 · 2^(e + 49) the last bit of a float64 weighs 2^(e - 3), as that of an e4m3 number of exponent e
        # does, so that adding and subtracting it rounds. Clamped because the cast of values beyond 448 is NaN or 448,
        # depending on the version of torch.
        within = (values.to(torch.float64) / scale).clamp(-E4M3_MAX, E4M3_MAX)
        exponent = within.view(torch.int64).bitwise_and(_EXPONENT_BITS).clamp_(min=_LEAST_EXPONENT)
        anchor = exponent.add_(_SHIFTED).bitwise_or_(_HALF).view(torch.float64)
        code.copy_((within + anchor).sub_(anchor).copysign_(within))
    return codes


def dequantize_e4m3(code: Tensor, scale: float) -> Tensor:
    """The value that a code stands for, code · scale: float8_e4m3fn of any shape to float64."""
    _require_scale(scale)
    return code.to(torch.float64).mul_(scale)


def e4m3_ordinal(code: Tensor) -> Tensor:
    """Number the codes in the order of their values, neighbours one apart and both zeros 0: float8 to int16."""
    bits = code.view(torch.uint8).to(torch.int16)
    magnitude = bits & 0x7F
    if bool((magnitude == _NAN_MAGNITUDE).any()):
        raise ValueError("expected finite e4m3 codes, got NaN; compare the NaN masks first and number the rest")
    return torch.where(bits >= 0x80, -magnitude, magnitude)


def quantize_e2m1(x: Tensor) -> Tensor:
    """The e2m1 codes of finite values, rounded to nearest-even and saturated to ±6: uint8 of x's shape, 0 to 15."""
    values = torch.tensor(_E2M1, dtype=torch.float64, device=x.device)
    magnitude = x.to(torch.float64).abs().clamp(max=E2M1_MAX)
    _, exponent = torch.frexp(magnitude)
    step = torch.exp2((exponent - 1).clamp(min=0).to(torch.float64) - 1)
    code = torch.searchsorted(values, torch.round(magnitude / step) * step)
    return (code + _E2M1_SIGN * torch.signbit(x)).to(torch.uint8)


def dequantize_e2m1(code: Tensor) -> Tensor:
    """The values that e2m1 codes, uint8 of 0 to 15, stand for: float64 of the same shape."""
    values = torch.tensor(_E2M1, dtype=torch.float64, device=code.device)[(code % _E2M1_SIGN).long()]
    return torch.where(code >= _E2M1_SIGN, -values, values)


def next_exponent(x: Tensor) -> Tensor:
    """The exponent of the least power of two that is not below each positive number, as float64."""
    mantissa, exponent = torch.frexp(x)
    return (exponent - (mantissa == 0.5).int()).to(torch.float64)


def _require_scale(scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"expected a positive finite scale, got {scale}")
