"""The layer's forward at a profile run, an output buffer, or a part without a kernel; calls on its cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.layer.cache_ops import (
    cache_dtype,
    concat_and_cache_mla,
    copy_blocks_mla,
    encode,
    gather_cache,
    swap_blocks,
)
from mla_conformance.reference.quantization import quantize_e4m3

PREFILLS = [(5, 0, True), (3, 0, True), (4, 0, True)]
DECODES = [(1, 0, False), (1, 0, False), (1, 0, False)]
ONE = torch.tensor(1.0)


def metadata_of(one: Any, profile: bool = False) -> Any:
    """Metadata of the first route with the state's workspace."""
    builder, state = one.world.builder(), one.world.backend.get_state_cls()(one.world.runner())
    builder.is_profile_run = profile
    metadata = builder.build_from_requests(one.requests)
    state.begin_forward(SimpleNamespace(attn_metadata=metadata, input_tokens=torch.zeros(1)))
    return metadata


def forward(one: Any, metadata: Any, cache: Any = None, rows: int | None = None, **given: Any) -> Any:
    w, operands = one.world, (x[:rows] for x in one.operands())
    return w.impl().forward(w.layer, *operands, w.cache if cache is None else cache, metadata, **given)


def test_a_profile_run_computes_nothing_or_reserves_and_a_cache_without_elements_is_not_written(
    world: Any, batch: Any
) -> None:
    one = batch(world(), PREFILLS)
    assert forward(one, None, one.world.cache[:0]).abs().max() == 0
    reserving, computed = metadata_of(one, profile=True), forward(one, metadata_of(one))
    assert reserving.is_profile_run and torch.equal(forward(one, reserving), computed)
    assert torch.equal(forward(one, metadata_of(one), torch.empty(0)), computed)


def test_what_a_forward_has_no_place_for_is_refused(world: Any, batch: Any) -> None:
    one = batch(world(), DECODES)
    metadata = metadata_of(one)
    with pytest.raises(
        ValueError, match=r"expected an output \[3, 36\] of torch.float32, got \[3, 36\] of torch.float1"
    ):
        forward(one, metadata, output=torch.zeros(3, 36).half())
    with pytest.raises(
        ValueError, match=r"at least 3 tokens by the metadata.*got 2 of q, 2 of k_c_normed and 2 of k_pe"
    ):
        forward(one, metadata, rows=2)
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(UnsupportedConfiguration, match="quantised output not supported; quantise the result"):
            forward(one, metadata, None, None, **{scale: ONE})
    for absent, requests in (("prefill", PREFILLS), ("decode", DECODES)):
        lacking = batch(world(**{absent: None}), requests)
        said = f"batch has a {absent}, and the layer has no {absent} backend"
        with pytest.raises(UnsupportedConfiguration, match=said):
            forward(lacking, metadata_of(lacking))


def write(slots: list[int], layout: str) -> Any:
    rows = torch.ones(2, 40)
    return lambda cache: concat_and_cache_mla(rows[:, :32], rows[:, 32:], cache, torch.tensor(slots), layout, ONE)


def read(table: list[list[int]], length: int) -> Any:
    given = torch.empty(9, 40), torch.tensor(table), torch.tensor([0, length])
    return lambda cache: gather_cache(cache, *given, 1, None, "auto", ONE)


def copy(*pairs: list[int]) -> Any:
    return lambda cache: copy_blocks_mla([cache], torch.tensor(pairs))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (write([3, -2], "auto"), r"expected slots in 0\.\.255, or -1 .*, got -2\.\.3"),
        (write([3, 256], "auto"), r"expected slots in 0\.\.255, or -1 .*, got 3\.\.256"),
        (write([0], "int4"), "expected a cache dtype of auto, fp8, fp8_ds_mla, got 'int4'"),
        (write([0], "fp8"), r"expected a cache \[blocks, page, 40\] of torch.float8_e4m3fn, got \[64, 4, 40\]"),
        (write([0, 1, 2], "auto"), "rotated key for each of 3 slots, got 2 and 2"),
        (write([0], "fp8_ds_mla"), r"fp8_ds_mla holds latents and rope keys of 512 and 64 or .*, got 32 and 8"),
        (read([[1, 2]], 9), "table is too short: a request needs 3 blocks, a row holds 2"),
        (read([[1, -1]], 5), r"expected blocks in 0\.\.63, for every page .*, got -1\.\.1"),
        (read([[64]], 1), r"got 64\.\.64"),
        (read([[1, 2, 3]], 10), "expected room for 10 gathered tokens, got 9; enlarge the workspace"),
        (copy([64, 1], [0, 2]), r"source blocks in 0\.\.63, of the source cache, got 0\.\.64"),
        (copy([4, -1]), r"destination blocks in 0\.\.63, .*, got -1\.\.-1"),
        (copy([4, 2], [5, 2]), r"each destination block once, got \[2, 2\]"),
        (lambda cache: swap_blocks(cache, cache[:, :2], torch.tensor([[0, 0]])), r"caches of one page and dtype, got"),
        (lambda cache: cache_dtype("fp8_ds_mla", cache.dtype), r"values of bfloat16 or float16, got torch\.float32"),
    ],
)
def test_calls_on_the_cache_that_do_not_fit_are_refused(call: Any, said: str) -> None:
    cache = torch.full((64, 4, 40), torch.nan)
    with pytest.raises(ValueError, match=said):
        call(cache)
    assert cache.isnan().all()


def test_codes_saturate_keep_nan_and_round_to_nearest_even() -> None:
    x = torch.tensor([[1e4, -1e4, torch.inf, -torch.inf, 449.0, 0.0, -0.0]])
    codes = encode(x, torch.tensor([[torch.nan]]), "fp8", ONE)
    assert codes.float()[0, :5].tolist() == [448, -448, 448, -448, 448]
    assert codes[0, 7].isnan() and codes.view(torch.uint8)[0, 5:7].tolist() == [0, 0x80]
    ties = torch.arange(256, dtype=torch.float32)[None] / 16
    expected = quantize_e4m3(ties, 1.0).view(torch.uint8)
    assert encode(ties, ties, "fp8", ONE).view(torch.uint8)[:, :256].equal(expected)
