"""e4m3 codes and entries, those in tiles among them: bytes by hand, what they mean, pages, and blocks that move."""

import math
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from mla_conformance.reference import cache_layout, quantization
from mla_conformance.reference.cache_layout import (
    cache_dtype,
    decode_rows,
    encode,
    entry_width,
    page_parts,
    read_entries,
    steady,
    write_entries,
)
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.quantization import E4M3_MAX, e4m3_ordinal, quantize_e4m3

BF16 = torch.bfloat16


def latents(tokens: int, seed: int = 0, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv_c, k_pe = (torch.randn(tokens, width, generator=generator).to(dtype) for width in (512, 64))
    return kv_c, k_pe


def test_auto_keeps_the_bits_and_blocks_are_copied_within_every_cache_and_between_two() -> None:
    kv_c, k_pe = torch.tensor([[0.25, 1000.0]], dtype=BF16), torch.tensor([[-0.5, 1e-6]], dtype=BF16)
    as_it_is = encode(kv_c, k_pe, "auto", 3.0)
    assert torch.equal(as_it_is, torch.cat((kv_c, k_pe), dim=-1))
    assert torch.equal(torch.cat(decode_rows(as_it_is, "auto", 7.0, 2, 2), dim=-1), as_it_is.double())
    rows = encode(kv_c, k_pe, "fp8", 0.5)
    assert rows.float().tolist() == [[0.5, 448.0, -1.0, 0.0]]
    decoded = decode_rows(rows, "fp8", 0.5, 2, 2)
    assert decoded[0].tolist() == [[0.25, 224.0]] and decoded[1].tolist() == [[-0.5, 0.0]]
    caches = [torch.arange(5.0).view(5, 1, 1).repeat(1, 2, 3).to(dtype) for dtype in (BF16, torch.float8_e4m3fn)]
    cache_layout.copy_blocks(caches, torch.tensor([[1, 2], [2, 0]]))
    assert [cache[:, 0, 0].tolist() for cache in map(torch.Tensor.float, caches)] == [[2.0, 1.0, 1.0, 3.0, 4.0]] * 2
    other = torch.zeros(3, 2, 3, dtype=BF16)
    cache_layout.swap_blocks(caches[0], other, torch.tensor([[4, 1]]))
    assert other[:, 1, 2].tolist() == [0.0, 4.0, 0.0] and caches[0][4, 0, 0] == 4


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
    # An entry without rope holds zeros there.
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
    ordinals, values = e4m3_ordinal(codes), quantization.dequantize_e4m3(codes, 1.0)
    assert ordinals.dtype == torch.int16 and sorted(set(ordinals.tolist())) == list(range(-126, 127))
    by_ordinal = values[ordinals.argsort()]
    assert (by_ordinal.diff() >= 0).all()
    assert values.abs().max() == E4M3_MAX
    assert values[:127].tolist() == [float(value) for value in VALUES]


NO_ROPE = torch.zeros(1, 0, dtype=BF16)


def key(columns: dict[int, float]) -> torch.Tensor:
    """[1, 512], zeros but for these columns."""
    found = torch.zeros(1, 512, dtype=BF16)
    for column, value in columns.items():
        found[0, column] = value
    return found


def test_widths_are_those_of_the_published_formats() -> None:
    widths = {"fp8_ds_mla": 656, "fp8_v4": 584, "fp8_v41": 528, "fp4_v41": 288, "nvfp4_ds_mla": 352, "nvfp4_v4": 384}
    widths |= dict.fromkeys(("fp8_index", "fp8_index_flat", "fp8_index_shuffled"), 132)
    assert {name: form.width for name, form in TILED_FORMATS.items()} == widths
    v4 = TILED_FORMATS["fp8_v4"]
    assert v4.parts == (576, 8)
    # 64 · 584 bytes are 64.9 times 576, one entry alone takes two.
    assert (v4.page_bytes(64), v4.page_bytes(1), v4.page_bytes(72)) == (65 * 576, 2 * 576, 73 * 576)
    assert TILED_FORMATS["fp8_v41"].page_bytes(64) == 64 * 528
    assert (TILED_FORMATS["nvfp4_v4"].parts, TILED_FORMATS["nvfp4_v4"].page_bytes(64)) == ((352, 32), 64 * 384)


KEYS = {
    "fp8_ds_mla": {0: 448.0, 1: -3.5, 128: 896.0, 511: 1.0},
    "fp8_v4": {0: 448.0, 1: -3.5, 64: 896.0, 447: 1.0, 448: -2.0, 511: 7.0},
    "fp8_v41": {31: 448.0, 32: -450.0, 511: 224.0},
    "fp4_v41": {0: 6.0, 1: -1.5, 2: 0.5, 16: 12.0, 17: -2.6},
    "nvfp4_ds_mla": {0: 6.0, 1: -1.5, 16: 12.0},
    "nvfp4_v4": {0: 6.0, 1: -1.5, 447: 12.0, 448: -2.0, 511: 7.0},
}
ROPES = {"fp8_ds_mla": torch.arange(64.0)[None], "nvfp4_ds_mla": torch.tensor([[1.0, *[0.0] * 62, -500.0]])}
ROPES = {name: rope.to(BF16) for name, rope in ROPES.items()}
E4M3, BYTE = torch.float8_e4m3fn, torch.uint8
BY_HAND: list[tuple[str, slice, torch.dtype, dict[int, Any]]] = [
    ("fp8_ds_mla", slice(512), E4M3, {0: 448.0, 1: -3.5, 2: 0.0, 128: 448.0, 511: 448.0}),
    ("fp8_ds_mla", slice(512, 528), torch.float32, {0: 1.0, 1: 2.0, 2: 1.0, 3: pytest.approx(1 / 448)}),
    ("fp8_ds_mla", slice(528, 656), BF16, dict(enumerate(range(64)))),
    ("fp8_v4", slice(448), E4M3, {0: 448.0, 1: -3.5, 2: 0.0, 64: 448.0, 447: 256.0}),
    ("fp8_v4", slice(448, 576), BF16, {0: -2.0, 1: 0.0, 63: 7.0}),
    # Exponents of the least powers of two that are 1, 2 and 1/448, of tiles of zeros 2^-13; the last byte is unused.
    ("fp8_v4", slice(576, 584), BYTE, dict(enumerate([127, 128, 114, 114, 114, 114, 127 - 8, 0]))),
    ("fp8_v41", slice(512), E4M3, {31: 448.0, 32: -224.0, 511: 448.0}),
    ("fp8_v41", slice(512, 528), BYTE, dict(enumerate([127, 128, *[114] * 13, 126]))),
    # Column 0 in the low half: 6 is code 7, -1.5 code 8 + 3; the next byte has 0.5, and -2.6 / 2 rounds to -1.5.
    ("fp4_v41", slice(256), BYTE, {0: 7 | 11 << 4, 1: 1, 8: 7 | (8 + 3) << 4}),
    ("fp4_v41", slice(256, 288), E4M3, {0: 1.0, 1: 2.0, 2: 2.0**-9}),
    ("nvfp4_ds_mla", slice(256), BYTE, {0: 7 | 11 << 4, 8: 7}),
    ("nvfp4_ds_mla", slice(256, 320), E4M3, {0: 1.0, 1: 0.0, 63: -448.0}),
    ("nvfp4_ds_mla", slice(320, 352), E4M3, {0: 1.0, 1: 2.0, 2: 2.0**-9}),
    ("nvfp4_v4", slice(224), BYTE, {0: 7 | 11 << 4, 223: 7 << 4}),
    ("nvfp4_v4", slice(224, 352), BF16, {0: -2.0, 1: 0.0, 63: 7.0}),
    ("nvfp4_v4", slice(352, 380), E4M3, {0: 1.0, 1: 2.0**-9, 27: 2.0}),
    ("nvfp4_v4", slice(380, 384), BYTE, dict.fromkeys(range(4), 0)),
]


@pytest.mark.parametrize(("layout", "part", "dtype", "numbers"), BY_HAND)
def test_an_entry_by_hand(layout: str, part: slice, dtype: torch.dtype, numbers: dict[int, float]) -> None:
    row = encode(key(KEYS[layout]), ROPES.get(layout, NO_ROPE), layout, 1.0)[0]
    found = row[part].view(dtype).tolist()
    assert {place: found[place] for place in numbers} == numbers


def test_the_scale_of_an_index_key_by_hand_and_tiles_on_the_edge_of_one() -> None:
    keys = torch.tensor([[448.0], [-450.0], [1e-5]]).to(BF16).expand(3, 128)
    for kind, scales in (("float32", [1.0, 450 / 448]), ("pow2", [1.0, 2.0, 2.0**-22])):
        rows = encode(keys, keys[:, :0], "fp8_index", 1.0, kind)
        found = rows[:, 128:].contiguous().view(torch.float32)[:, 0]
        assert torch.equal(found[: len(scales)], torch.tensor(scales))
    found = steady(key({0: 448.0, 32: 446.0, 64: 450.0}), TILED_FORMATS["fp8_v41"], "float32", 2.0**-20)
    assert found[0].tolist() == [False, *[True] * 15]
    ties = steady(key({0: 6 * 17 / 16, 16: 6.0}), TILED_FORMATS["fp4_v41"], "float32", 2.0**-20)
    assert ties[0, :2].tolist() == [False, True]
    keys = key({0: 448.0})[:, :128]
    assert bool(steady(keys, TILED_FORMATS["fp8_index"], "float32", 2.0**-20).all())
    assert not bool(steady(keys, TILED_FORMATS["fp8_index"], "pow2", 2.0**-20).all())


def test_shuffled_codes_stand_in_tiles_of_16_tokens_and_columns() -> None:
    cache, row = torch.zeros(2, 32, 132, dtype=torch.uint8), torch.arange(1, 133, dtype=torch.uint8)[None]
    write_entries(cache, row, torch.tensor([32 + 17]), "fp8_index_shuffled")
    block = cache[1].flatten()
    # The second token of the second 16: columns 0 to 15 follow those of the first, the next 16 follow all 16 tokens'.
    tile = 16 * 128
    assert block[tile + 16 : tile + 32].tolist() == [*range(1, 17)]
    assert block[tile + 256 + 16 : tile + 256 + 32].tolist() == [*range(17, 33)]
    assert block[32 * 128 + 17 * 4 :][:4].tolist() == [129, 130, 131, 132]
    assert int((cache > 0).sum()) == 132
    assert torch.equal(read_entries(cache, torch.tensor([32 + 17]), "fp8_index_shuffled"), row)


def test_the_meaning_of_a_byte_is_its_code_times_its_scale_and_codes_of_e2m1_are_nearest() -> None:
    row = torch.zeros(1, 528, dtype=torch.uint8)
    row[0, 0], row[0, 33] = 0x38, 0xB8  # 1.0 and -1.0
    row[0, 512:515] = torch.tensor([130, 0, 255], dtype=torch.uint8)
    keys = decode_rows(row, "fp8_v41", 1.0, 512, 0)[0][0]
    assert (keys[0].item(), keys[33].item()) == (8.0, -(2.0**-127)) and bool(keys[64:96].isnan().all())
    row = encode(key(KEYS["nvfp4_ds_mla"]), ROPES["nvfp4_ds_mla"], "nvfp4_ds_mla", 1.0)
    kv_c, k_pe = decode_rows(row, "nvfp4_ds_mla", 1.0, 512, 64)
    assert kv_c[0, [0, 1, 16]].tolist() == [6.0, -1.5, 12.0] and k_pe[0, [0, 63]].tolist() == [1.0, -448.0]
    given = [0.0, 0.24, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100.0, -0.75, -5.0]
    found = quantization.dequantize_e2m1(quantization.quantize_e2m1(torch.tensor(given, dtype=torch.float64)))
    assert found.tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -1.0, -4.0]
    every = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(quantization.quantize_e2m1(quantization.dequantize_e2m1(every)), every)


@pytest.mark.parametrize("layout", ["auto", "fp8_ds_mla", "fp4_v41", "fp8_v4"])
def test_entries_come_back_from_their_slots_and_nothing_else_is_written(layout: str) -> None:
    rows = torch.arange(3 * entry_width(layout, 512, 0)).reshape(3, -1).to(BF16 if layout == "auto" else torch.uint8)
    buffer = torch.full((5, 2, 4 * rows.shape[1] + 40), 7).to(rows.dtype)
    cache = buffer[:, 1, : 4 * rows.shape[1]].unflatten(1, (4, rows.shape[1]))
    slots = torch.tensor([13, -1, 6])
    write_entries(cache, rows, slots, layout)
    assert torch.equal(read_entries(cache, slots[[0, 2]], layout), rows[[0, 2]])
    if layout == "fp8_v4":  # the scales of a page stand behind the data of all its entries
        assert torch.equal(cache[3].flatten()[576 : 2 * 576], rows[0, :576])
        assert torch.equal(cache[3].flatten()[4 * 576 + 8 :][:8], rows[0, 576:])
        assert [tuple(part.shape) for part in page_parts(cache, layout)] == [(5, 4, 576), (5, 4, 8)]
    others = torch.tensor([slot for slot in range(20) if slot not in (13, 6)])
    assert bool((read_entries(cache, others, layout) == 7).all()) and bool((buffer[:, 0] == 7).all())
    assert bool((buffer[:, 1, 4 * rows.shape[1] :] == 7).all())


ROWS = torch.zeros(2, 512)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: entry_width("int8", 512, 64), "unknown cache layout 'int8'; expected one of auto, fp8, fp8_ds_mla"),
    (lambda: entry_width("fp8_ds_mla", 256, 64), "latents and rope keys of 512 and 64 or 512 and 0, got 256 and 64"),
    (lambda: entry_width("fp8_v4", 512, 64), "fp8_v4 holds latents and rope keys of 512 and 0, got 512 and 64"),
    (lambda: cache_dtype("fp8_ds_mla", torch.float32), "bfloat16 or float16, got"),
    (lambda: decode_rows(torch.zeros(2, 40), "fp8", 1.0, 512, 64), r"expected fp8 entries \[S, 576\], got \[2, 40\]"),
    (lambda: encode(ROWS, torch.zeros(3, 64), "auto", 1.0), r"rope keys \[T, R\], got \[2, 512\] and \[3, 64\]"),
    (lambda: encode(*latents(1), "fp8_ds_mla", 1.0, "e8m0"), "unknown tile scales 'e8m0'; expected one of"),
    (lambda: encode(ROWS, ROWS[:, :0], "fp8_v4", 1.0), "fp8_v4 holds plain values of bfloat16 or float16, got"),
    (lambda: e4m3_ordinal(torch.full((1,), torch.nan).to(torch.float8_e4m3fn)), "got NaN"),
]
REFUSED += [(partial(quantize_e4m3, ROWS, x), "positive finite scale") for x in (0.0, -1.0, math.inf, math.nan)]


def test_misfits_are_refused() -> None:
    for call, said in REFUSED:
        with pytest.raises(ValueError, match=said):
            call()
