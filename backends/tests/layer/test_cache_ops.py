"""The operations on the paged cache, over each layout, with adversarial slots, pages and strides."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.layer.cache_ops import (
    cache_dtype,
    concat_and_cache_mla,
    copy_blocks_mla,
    decode,
    encode,
    gather_cache,
    swap_blocks,
)
from mla_conformance.reference.quantization import e4m3_ordinal, quantize_e4m3

ONE = torch.tensor(1.0)


def write(world: Any, cache: torch.Tensor, rows: torch.Tensor, slots: list[int]) -> None:
    rank = world.dims.latent
    scale = torch.tensor(world.k_scale)
    concat_and_cache_mla(rows[:, :rank], rows[:, rank:], cache, torch.tensor(slots), world.layout, scale)


def gather(world: Any, table: list[list[int]], lengths: list[int], starts: list[int] | None) -> torch.Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    dst = torch.full((sum(lengths) + 1, world.dims.width), torch.nan, dtype=world.dtype)
    first = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    scale = torch.tensor(world.k_scale)
    gather_cache(world.cache, dst, torch.tensor(table), bounds, len(lengths), first, world.layout, scale)
    assert dst[-1].isnan().all()
    return dst[:-1]


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def test_the_bytes_are_those_of_the_layout(layout_world: Any, batch: Any) -> None:
    """The layer's write and the tests' own encoding, tile by tile, leave the same cache."""
    one = batch(layout_world, [(0, 11, False), (0, 5, False)])
    written = layout_world.cache.clone()
    one.store_context()
    slots = [b * 4 + t for r in one.requests for b in r.block_ids for t in range(4)]
    write(layout_world, written, torch.cat(one.latents), slots[:11] + slots[12:17])
    expected = raw(layout_world.cache)
    if layout_world.layout == "fp8_ds_mla":
        # Where the quotient in float32 is a tie that the exact one is not, the neighbouring code is as good.
        owned = raw(written).ne(0xFF).any(dim=-1)
        codes = [x[owned][:, :512].contiguous().view(torch.float8_e4m3fn) for x in (written, layout_world.cache)]
        apart = (e4m3_ordinal(codes[0]) - e4m3_ordinal(codes[1])).abs()
        assert apart.max() <= 1 and apart.sum() < 16
        raw(written)[..., :512] = expected[..., :512]
    assert raw(written).equal(expected)


def test_minus_one_and_rows_past_the_slots_write_nothing(layout_world: Any) -> None:
    rows = layout_world.normal(5, 4, layout_world.dims.width)
    cache, before = layout_world.cache, layout_world.cache.clone()
    write(layout_world, cache, rows, [-1, -1])
    write(layout_world, cache, rows, [])
    assert raw(cache).equal(raw(before))
    write(layout_world, cache, rows, [-1, 6, -1])
    expected = layout_world.empty_cache(64)
    write(layout_world, expected, rows[1:2], [6])
    assert raw(cache).equal(raw(expected))


def test_slot_0_and_the_last_slot(layout_world: Any) -> None:
    rows = layout_world.normal(6, 2, layout_world.dims.width)
    write(layout_world, layout_world.cache, rows, [0, 255])
    assert gather(layout_world, [[0], [63]], [1, 1], [0, 3]).isfinite().all()


@pytest.mark.parametrize("slot", [-2, 256])
def test_a_slot_outside_of_the_cache_is_refused(layout_world: Any, slot: int) -> None:
    rows = layout_world.normal(6, 2, layout_world.dims.width)
    before = layout_world.cache.clone()
    bounds = f"{min(slot, 3)}..{max(slot, 3)}"
    with pytest.raises(ValueError, match=rf"expected slots in 0\.\.255, or -1 .*, got {bounds}"):
        write(layout_world, layout_world.cache, rows, [3, slot])
    assert raw(layout_world.cache).equal(raw(before))


def test_gather_reads_only_what_it_is_asked_for(layout_world: Any, batch: Any) -> None:
    one = batch(layout_world, [(0, 11, False), (0, 5, False), (0, 0, False), (0, 9, False)])
    one.store_context()
    table = [[*r.block_ids, *[-7] * (4 - len(r.block_ids))] for r in one.requests]
    got = gather(layout_world, table, [6, 2, 0, 9], [5, 3, 0, 0])
    want = torch.cat([rows[a:b] for rows, a, b in zip(one.latents, (5, 3, 0, 0), (11, 5, 0, 9), strict=True)])
    tolerance = 0 if layout_world.layout == "auto" else 0.07
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert gather(layout_world, table, [11, 5, 0, 9], None).isfinite().all()
    assert gather(layout_world, table, [0, 0, 0, 0], None).numel() == 0


def test_a_cache_between_other_layers(layout_world: Any, batch: Any) -> None:
    """The stride between blocks exceeds a packed block, and the layers around stay as they are."""
    one = batch(layout_world, [(0, 11, False)])
    layers = torch.stack([layout_world.cache, layout_world.cache, layout_world.cache], dim=1)
    before, layout_world.cache = layers.clone(), layers[:, 1]
    slots = [b * 4 + t for b in one.requests[0].block_ids for t in range(4)][:11]
    write(layout_world, layout_world.cache, one.latents[0], slots)
    got = gather(layout_world, [one.requests[0].block_ids], [11], None)
    torch.testing.assert_close(got, one.latents[0], atol=0.07, rtol=0.07)
    assert raw(layers)[:, ::2].equal(raw(before)[:, ::2])


def test_gather_refuses_what_does_not_fit(world: Any) -> None:
    w = world()
    with pytest.raises(ValueError, match="table is too short: a request needs 3 blocks, a row holds 2"):
        gather(w, [[1, 2]], [9], None)
    with pytest.raises(ValueError, match=r"expected blocks in 0\.\.63, for every page .*, got -1\.\.1"):
        gather(w, [[1, -1]], [5], None)
    with pytest.raises(ValueError, match=r"got 64\.\.64"):
        gather(w, [[64]], [1], None)
    with pytest.raises(ValueError, match="expected room for 5 gathered tokens, got 4; enlarge the workspace"):
        gather_cache(w.cache, torch.empty(4, 40), torch.zeros(1, 2), torch.tensor([0, 5]), 1, None, "auto", ONE)


def test_unknown_layouts_and_foreign_caches_are_refused(world: Any) -> None:
    w = world()
    rows = w.normal(1, 2, 40)
    with pytest.raises(ValueError, match="expected a cache dtype of auto, fp8, fp8_ds_mla, got 'int4'"):
        concat_and_cache_mla(rows[:, :32], rows[:, 32:], w.cache, torch.tensor([0]), "int4", ONE)
    with pytest.raises(
        ValueError, match=r"expected a cache \[blocks, page, 40\] of torch.float8_e4m3fn, got \[64, 4, 40\]"
    ):
        concat_and_cache_mla(rows[:, :32], rows[:, 32:], w.cache, torch.tensor([0]), "fp8", ONE)
    with pytest.raises(ValueError, match="rotated key for each of 3 slots, got 2 and 2"):
        concat_and_cache_mla(rows[:, :32], rows[:, 32:], w.cache, torch.tensor([0, 1, 2]), "auto", ONE)
    with pytest.raises(ValueError, match=r"fp8_ds_mla holds latents and rope keys of 512 and 64 or .*, got 32 and 8"):
        concat_and_cache_mla(rows[:, :32], rows[:, 32:], w.cache, torch.tensor([0]), "fp8_ds_mla", ONE)
    with pytest.raises(ValueError, match=r"plain values of bfloat16 or float16, got torch\.float32"):
        cache_dtype("fp8_ds_mla", torch.float32)


def test_codes_saturate_and_keep_nan() -> None:
    x = torch.tensor([[1e4, -1e4, torch.inf, -torch.inf, 449.0, 0.0, -0.0]])
    codes = encode(x, torch.tensor([[torch.nan]]), "fp8", ONE)
    assert codes.float()[0, :5].tolist() == [448, -448, 448, -448, 448]
    assert codes[0, 7].isnan() and raw(codes)[0, 5:7].tolist() == [0, 0x80]


def test_codes_round_to_nearest_even() -> None:
    ties = torch.arange(256, dtype=torch.float32)[None] / 16
    assert raw(encode(ties, ties, "fp8", ONE))[:, :256].equal(raw(quantize_e4m3(ties, 1.0)))


def test_a_tile_of_zeros_has_scale_1_and_stays_0() -> None:
    kv_c = torch.zeros(1, 512, dtype=torch.bfloat16)
    kv_c[0, 200] = 3.0
    entry = encode(kv_c, torch.ones(1, 64, dtype=torch.bfloat16), "fp8_ds_mla", ONE)
    assert entry.shape == (1, 656) and entry.dtype == torch.uint8
    assert entry[0, 512:528].view(torch.float32).tolist() == pytest.approx([1.0, 3 / 448, 1.0, 1.0])
    back = decode(entry, "fp8_ds_mla", torch.bfloat16, ONE)
    assert back[0, :512].equal(kv_c[0]) and back[0, 512:].eq(1).all()


def test_copy_blocks_reads_before_it_writes(layout_world: Any) -> None:
    raw(layout_world.cache).copy_(torch.randint(0, 127, layout_world.cache.view(torch.uint8).shape, dtype=torch.uint8))
    caches = [layout_world.cache, layout_world.cache.clone()]
    before = layout_world.cache.clone()
    copy_blocks_mla(caches, torch.tensor([[1, 2], [2, 3], [5, 1]]))
    for cache in caches:
        assert raw(cache)[[2, 3, 1]].equal(raw(before)[[1, 2, 5]])
        assert raw(cache)[[0, 5, 63]].equal(raw(before)[[0, 5, 63]])


def test_swap_blocks_copies_to_another_cache(layout_world: Any) -> None:
    raw(layout_world.cache).copy_(torch.randint(0, 127, layout_world.cache.view(torch.uint8).shape, dtype=torch.uint8))
    other, before = layout_world.empty_cache(8), layout_world.cache.clone()
    layout_world.backend.swap_blocks(layout_world.cache, other, torch.tensor([[60, 7], [0, 3]]))
    assert raw(other)[[7, 3]].equal(raw(before)[[60, 0]])
    assert raw(other)[[0, 1, 2, 4, 5, 6]].eq(0xFF).all() and raw(layout_world.cache).equal(raw(before))


def test_block_copies_that_make_no_sense_are_refused(world: Any) -> None:
    cache = world().cache
    with pytest.raises(ValueError, match=r"source blocks in 0\.\.63, of the source cache, got 0\.\.64"):
        copy_blocks_mla([cache], torch.tensor([[64, 1], [0, 2]]))
    with pytest.raises(ValueError, match=r"destination blocks in 0\.\.63, .*, got -1\.\.-1"):
        copy_blocks_mla([cache], torch.tensor([[4, -1]]))
    with pytest.raises(ValueError, match=r"each destination block once, got \[2, 2\]"):
        copy_blocks_mla([cache], torch.tensor([[4, 2], [5, 2]]))
    with pytest.raises(ValueError, match=r"caches of one page and dtype, got \[64, 4, 40\]"):
        swap_blocks(cache, cache[:, :2], torch.tensor([[0, 0]]))
