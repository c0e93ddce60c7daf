"""e4m3 codes and entries of the cache: values derived by hand, the consumer's formula, and blocks that move."""

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from mla_conformance.reference.cache_layout import (
    cache_dtype,
    copy_blocks,
    decode_rows,
    encode,
    entry_width,
    swap_blocks,
)
from mla_conformance.reference.quantization import E4M3_MAX, dequantize_e4m3, e4m3_ordinal, quantize_e4m3

BF16 = torch.bfloat16


def latents(tokens: int, seed: int = 0, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, 512, generator=generator).to(dtype),
        torch.randn(tokens, 64, generator=generator).to(dtype),
    )


def test_auto_keeps_the_bits_and_fp8_divides_both_parts_by_the_scale() -> None:
    kv_c, k_pe = torch.tensor([[0.25, 1000.0]], dtype=BF16), torch.tensor([[-0.5, 1e-6]], dtype=BF16)
    as_it_is = encode(kv_c, k_pe, "auto", 3.0)
    assert torch.equal(as_it_is, torch.cat((kv_c, k_pe), dim=-1))
    assert torch.equal(torch.cat(decode_rows(as_it_is, "auto", 7.0, 2, 2), dim=-1), as_it_is.double())
    rows = encode(kv_c, k_pe, "fp8", 0.5)
    assert rows.float().tolist() == [[0.5, 448.0, -1.0, 0.0]]
    decoded = decode_rows(rows, "fp8", 0.5, 2, 2)
    assert decoded[0].tolist() == [[0.25, 224.0]] and decoded[1].tolist() == [[-0.5, 0.0]]


def test_a_tile_of_the_mixed_entry_by_hand() -> None:
    kv_c, k_pe = torch.zeros(1, 512, dtype=BF16), torch.arange(64, dtype=BF16).unsqueeze(0)
    kv_c[0, 0], kv_c[0, 1], kv_c[0, 128], kv_c[0, 511] = 448.0, -3.5, 896.0, 1.0
    row = encode(kv_c, k_pe, "fp8_ds_mla", 5.0)[0]
    scales = row[512:528].view(torch.float32).tolist()
    assert scales[:3] == [1.0, 2.0, 1.0] and scales[3] == pytest.approx(1 / 448)
    codes = row[:512].view(torch.float8_e4m3fn).float()
    assert codes[[0, 1, 2, 128, 511]].tolist() == [448.0, -3.5, 0.0, 448.0, 448.0]
    assert row[528:].view(BF16).tolist() == list(range(64))


def test_tiles_of_zeros_and_of_dust_stay_finite() -> None:
    kv_c, k_pe = torch.zeros(1, 512, dtype=BF16), torch.zeros(1, 64, dtype=BF16)
    kv_c[0, 200] = 2.0**-133
    decoded, _ = decode_rows(encode(kv_c, k_pe, "fp8_ds_mla", 1.0), "fp8_ds_mla", 1.0, 512, 64)
    assert bool(decoded.isfinite().all()) and bool((decoded.abs() <= 2.0**-132).all())


def test_blocks_are_copied_within_every_cache_and_between_two() -> None:
    caches = [torch.arange(5.0).view(5, 1, 1).repeat(1, 2, 3).to(dtype) for dtype in (BF16, torch.float8_e4m3fn)]
    copy_blocks(caches, torch.tensor([[1, 2], [2, 0]]))
    assert [cache[:, 0, 0].tolist() for cache in map(torch.Tensor.float, caches)] == [[2.0, 1.0, 1.0, 3.0, 4.0]] * 2
    other = torch.zeros(3, 2, 3, dtype=BF16)
    swap_blocks(caches[0], other, torch.tensor([[4, 1]]))
    assert other[:, 1, 2].tolist() == [0.0, 4.0, 0.0] and caches[0][4, 0, 0] == 4


def test_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown cache layout 'int8'; expected one of auto, fp8, fp8_ds_mla"):
        entry_width("int8", 512, 64)
    with pytest.raises(ValueError, match="latents and rope keys of 512 and 64 or 512 and 0, got 256 and 64"):
        entry_width("fp8_ds_mla", 256, 64)
    with pytest.raises(ValueError, match="bfloat16 or float16, got"):
        cache_dtype("fp8_ds_mla", torch.float32)
    with pytest.raises(ValueError, match=r"expected fp8 entries \[S, 576\], got \[2, 40\]"):
        decode_rows(torch.zeros(2, 40), "fp8", 1.0, 512, 64)
    with pytest.raises(ValueError, match=r"rope keys \[T, R\], got \[2, 512\] and \[3, 64\]"):
        encode(torch.zeros(2, 512), torch.zeros(3, 64), "auto", 1.0)
    with pytest.raises(ValueError, match="unknown tile scales 'e8m0'; expected one of float32, pow2"):
        encode(*latents(1), "fp8_ds_mla", 1.0, "e8m0")


def test_scales_that_are_powers_of_two_hold_every_tile_and_are_the_least_that_do() -> None:
    kv_c, k_pe = latents(5)
    kv_c[0, :128], kv_c[1, :128] = 0.0, 1e-9
    rows = encode(kv_c, k_pe, "fp8_ds_mla", 1.0, "pow2")
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    least = kv_c.double().unflatten(1, (4, 128)).abs().amax(dim=-1) / 448
    assert bool((scales.log2() == scales.log2().round()).all()) and scales[0, 0] == scales[1, 0] == 2.0**-13
    assert bool((scales >= least).all()) and bool(((scales < 2 * least) | (scales == 2.0**-13)).all())
    decoded, _ = decode_rows(rows, "fp8_ds_mla", 1.0, 512, 64)
    assert bool(((decoded - kv_c.double()).abs() <= scales.repeat_interleave(128, 1) * 16).all())


def test_an_entry_without_rope_holds_zeros_there() -> None:
    kv_c, k_pe = latents(3)
    rows = encode(kv_c, k_pe[:, :0], "fp8_ds_mla", 1.0)
    assert rows.shape == (3, 656) == (3, entry_width("fp8_ds_mla", 512, 0)) and not rows[:, 528:].any()
    kept, rope = decode_rows(rows, "fp8_ds_mla", 1.0, 512, 0)
    assert torch.equal(kept, decode_rows(encode(kv_c, k_pe, "fp8_ds_mla", 1.0), "fp8_ds_mla", 1.0, 512, 64)[0])
    assert rope.shape == (3, 0)


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


def test_ordinals_count_the_codes_in_the_order_of_their_values() -> None:
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn)
    ordinals, values = e4m3_ordinal(codes), dequantize_e4m3(codes, 1.0)
    assert ordinals.dtype == torch.int16 and sorted(set(ordinals.tolist())) == list(range(-126, 127))
    by_ordinal = values[ordinals.argsort()]
    assert (by_ordinal.diff() >= 0).all()
    assert values.abs().max() == E4M3_MAX
    assert values[:127].tolist() == [float(value) for value in VALUES]


def test_refusals() -> None:
    nan = torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="got NaN"):
        e4m3_ordinal(nan)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive finite scale"):
            quantize_e4m3(torch.ones(1), scale)
