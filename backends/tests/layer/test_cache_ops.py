"""The operations on the paged cache: codes, and what is refused; the suite judges what they write and copy."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.layer.cache_ops import (
    cache_dtype,
    concat_and_cache_mla,
    copy_blocks_mla,
    encode,
    gather_cache,
    swap_blocks,
)
from mla_conformance.reference.quantization import quantize_e4m3

ONE = torch.tensor(1.0)
DSMLA = "fp8_ds_mla"


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.full((64, 4, 40), torch.nan)


def write(cache: torch.Tensor, slots: list[int], layout: str = "auto") -> None:
    rows = torch.ones(2, 40)
    concat_and_cache_mla(rows[:, :32], rows[:, 32:], cache, torch.tensor(slots), layout, ONE)


@pytest.mark.parametrize(
    ("slots", "layout", "said"),
    [
        ([3, -2], "auto", r"expected slots in 0\.\.255, or -1 .*, got -2\.\.3"),
        ([3, 256], "auto", r"expected slots in 0\.\.255, or -1 .*, got 3\.\.256"),
        ([0], "int4", "expected a cache dtype of auto, fp8, fp8_ds_mla, got 'int4'"),
        ([0], "fp8", r"expected a cache \[blocks, page, 40\] of torch.float8_e4m3fn, got \[64, 4, 40\]"),
        ([0, 1, 2], "auto", "rotated key for each of 3 slots, got 2 and 2"),
        ([0], DSMLA, r"fp8_ds_mla holds latents and rope keys of 512 and 64 or .*, got 32 and 8"),
    ],
)
def test_what_cannot_be_written_is_refused(slots: list[int], layout: str, said: str, cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=said):
        write(cache, slots, layout)
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("table", "length", "said"),
    [
        ([[1, 2]], 9, "table is too short: a request needs 3 blocks, a row holds 2"),
        ([[1, -1]], 5, r"expected blocks in 0\.\.63, for every page .*, got -1\.\.1"),
        ([[64]], 1, r"got 64\.\.64"),
        ([[1, 2, 3]], 10, "expected room for 10 gathered tokens, got 9; enlarge the workspace"),
    ],
)
def test_gather_refuses_what_does_not_fit(table: Any, length: int, said: str, cache: torch.Tensor) -> None:
    given = (torch.empty(9, 40), torch.tensor(table), torch.tensor([0, length]))
    with pytest.raises(ValueError, match=said):
        gather_cache(cache, *given, 1, None, "auto", ONE)


def test_codes_of_a_model_that_they_do_not_store_are_refused() -> None:
    with pytest.raises(ValueError, match=r"plain values of bfloat16 or float16, got torch\.float32"):
        cache_dtype(DSMLA, torch.float32)


def test_codes_saturate_keep_nan_and_round_to_nearest_even() -> None:
    x = torch.tensor([[1e4, -1e4, torch.inf, -torch.inf, 449.0, 0.0, -0.0]])
    codes = encode(x, torch.tensor([[torch.nan]]), "fp8", ONE)
    assert codes.float()[0, :5].tolist() == [448, -448, 448, -448, 448]
    assert codes[0, 7].isnan() and codes.view(torch.uint8)[0, 5:7].tolist() == [0, 0x80]
    ties = torch.arange(256, dtype=torch.float32)[None] / 16
    expected = quantize_e4m3(ties, 1.0).view(torch.uint8)
    assert encode(ties, ties, "fp8", ONE).view(torch.uint8)[:, :256].equal(expected)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([[64, 1], [0, 2]], r"source blocks in 0\.\.63, of the source cache, got 0\.\.64"),
        ([[4, -1]], r"destination blocks in 0\.\.63, .*, got -1\.\.-1"),
        ([[4, 2], [5, 2]], r"each destination block once, got \[2, 2\]"),
    ],
)
def test_block_copies_that_make_no_sense_are_refused(pairs: Any, said: str, cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=said):
        copy_blocks_mla([cache], torch.tensor(pairs))
    with pytest.raises(ValueError, match=r"caches of one page and dtype, got \[64, 4, 40\]"):
        swap_blocks(cache, cache[:, :2], torch.tensor([[0, 0]]))
