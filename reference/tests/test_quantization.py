"""Float8 e4m3 against exact rational arithmetic, over every code, every midpoint and its neighbours."""

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from mla_conformance.reference.quantization import (
    E4M3_MAX,
    dequantize_e4m3,
    e4m3_ordinal,
    quantize_e4m3,
    require_float8,
)


def value_of(code: int) -> Fraction:
    """The value of a non-negative code, from the format's definition."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 2**9)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


VALUES = [value_of(code) for code in range(0x7F)]


def nearest_code(x: Fraction) -> int:
    """The code of |x| rounded to nearest, ties to the even code, saturated; with the sign bit of x."""
    above = bisect_left(VALUES, abs(x))
    around = range(max(0, above - 1), min(above + 1, len(VALUES)))
    magnitude = min(around, key=lambda code: (abs(VALUES[code] - abs(x)), code & 1))
    return magnitude | (0x80 if x < 0 else 0)


def probes() -> list[float]:
    """Every value and midpoint, each with its float64 and its float32 neighbours, and points far outside."""
    edges = VALUES + [(a + b) / 2 for a, b in pairwise(VALUES)] + [Fraction(464), Fraction(480)]
    exact = [float(edge) for edge in edges]
    beside = [math.nextafter(x, direction) for x in exact for direction in (-math.inf, math.inf)]
    beside += [x * (1 + sign * 2.0**-30) for x in exact for sign in (-1, 1)]
    return exact + beside + [1e6, 1e300, 1e-300, 5e-324]


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-20])
def test_every_code_is_the_correctly_rounded_one(scale: float) -> None:
    points = [x * sign for x in probes() for sign in (1, -1) if x * scale / scale == x and x != 0]
    codes = quantize_e4m3(torch.tensor(points, dtype=torch.float64) * scale, scale).view(torch.uint8)
    assert codes.tolist() == [nearest_code(Fraction(x)) for x in points]
    ends = torch.tensor([math.inf, -math.inf, 1.7e308, -0.0, math.nan], dtype=torch.float64)
    *found, nan = quantize_e4m3(ends, 1e-300).view(torch.uint8).tolist()
    assert found == [0x7E, 0xFE, 0x7E, 0x80] and nan & 0x7F == 0x7F


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_round_once(dtype: torch.dtype) -> None:
    x = torch.linspace(-500, 500, 4001, dtype=torch.float64).to(dtype)
    codes = quantize_e4m3(x, 1.0).view(torch.uint8).tolist()
    assert codes == [nearest_code(Fraction(value)) for value in x.double().tolist()]


def test_ordinals_count_the_codes_in_the_order_of_their_values() -> None:
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn)
    ordinals, values = e4m3_ordinal(codes), dequantize_e4m3(codes, 1.0)
    assert ordinals.dtype == torch.int16 and sorted(set(ordinals.tolist())) == list(range(-126, 127))
    by_ordinal = values[ordinals.argsort()]
    assert (by_ordinal.diff() >= 0).all()
    assert values.abs().max() == E4M3_MAX
    assert values[:127].tolist() == [float(value) for value in VALUES]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="got NaN"):
        e4m3_ordinal(nan)
    with pytest.raises(ValueError, match=r"float8_e4m3fn, got torch\.uint8"):
        dequantize_e4m3(nan.view(torch.uint8), 1.0)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive finite scale"):
            quantize_e4m3(torch.ones(1), scale)
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(ValueError, match="without it; install"):
        require_float8()
