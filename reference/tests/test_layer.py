"""The routes of MLA and of a layer are one function, whatever its model adds to it; and a window is a mask."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.layer import ModelDimensions, PagedContext, QueryGrowth, WholeLayer, mla_layer
from mla_conformance.reference.projections import MLAWeights, Rotation, latents, rms_norm
from mla_conformance.tests.proof.yarn import Yarn

SMALL = ModelDimensions(hidden_size=64, num_heads=4, q_lora_rank=24, kv_lora_rank=32, head=PRESETS["small"].head)
PATHS: Any = ("compute_friendly", "data_movement_friendly", "chunked_prefill")
PLAIN = WholeLayer(model="M-1", dims=SMALL, scale=0.2, rotation=Rotation.plain(8, interleaved=True))
POSITIONS = torch.tensor([11, 12, 13, 14, 0, 1, 5, 6, 7])
"""Of the new tokens behind the three contexts of the batch."""
EXTENSION = Yarn(factor=4.0, original_positions=64, mscale=0.7, mscale_all_dim=1.0)
HALVES = EXTENSION.rotation(8, interleaved=False)
EVERYTHING = replace(
    PLAIN, rotation=HALVES, q_norm=1e-6, kv_norm=1e-5, k_pe_norm=0.0, doubled_query_latent=True, q_factor=1.5,
    kv_factor=0.7, growth=QueryGrowth(beta=0.1, period=4), gate="query_latent", window=4, sink=True,
)  # fmt: skip
SPECS = {
    "plain": PLAIN,
    "halves": replace(PLAIN, rotation=Rotation.plain(8, interleaved=False)),
    "unrotated": replace(PLAIN, rotation=None, window=1),
    "no-latent-query": replace(PLAIN, dims=replace(SMALL, q_lora_rank=None), gate="hidden"),
    "everything": EVERYTHING,
}


def weights_of(spec: WholeLayer, normal: Any) -> MLAWeights:
    dims, head, heads = spec.dims, spec.dims.head, spec.dims.num_heads
    hidden, rank, latent, width = dims.hidden_size, dims.q_lora_rank, dims.kv_lora_rank, head.v_head_dim
    rope, queries = head.qk_rope_head_dim, (rank or hidden) * (2 if spec.doubled_query_latent else 1)
    shapes: dict[str, tuple[int, ...] | None] = {
        "W_DQ": (hidden, rank) if rank else None,
        "W_UQ": (queries, heads, head.qk_nope_head_dim),
        "W_QR": (queries, heads, rope),
        "W_DKV": (hidden, latent),
        "W_UK": (latent, heads, head.qk_nope_head_dim),
        "W_KR": (hidden, rope),
        "W_UV": (latent, heads, width),
        "W_O": (heads * width, hidden),
        "q_norm": (rank,) if rank and spec.q_norm is not None else None,
        "kv_norm": None if spec.kv_norm is None else (latent,),
        "k_pe_norm": None if spec.k_pe_norm is None else (rope,),
        "W_G": {"hidden": (hidden, heads, width), "query_latent": (queries, heads, 1), None: None}[spec.gate],
        "sink": (heads,) if spec.sink else None,
    }
    drawn: dict[str, Any] = {}
    for seed, (name, shape) in enumerate(shapes.items(), 70):
        drawn[name] = shape and normal(seed, *shape) / (shape[0] ** 0.5 if len(shape) > 1 else 1.0)
    return MLAWeights(**drawn)


def run(spec: WholeLayer, weights: MLAWeights, prefill: Any, normal: Any, path: Any, **options: Any) -> Tensor:
    batch = {"query_start_loc": prefill.query_start_loc, "context": prefill.context}
    return mla_layer(normal(20, 9, 64), POSITIONS, weights, spec, path=path, **batch, **options)


@pytest.mark.parametrize("name", SPECS)
def test_layer_by_all_paths(name: str, prefill: Any, normal: Any) -> None:
    spec = SPECS[name]
    weights = weights_of(spec, normal)
    expanded = run(spec, weights, prefill, normal, "compute_friendly")
    assert expanded.shape == (9, 64) and 0.05 < expanded.std() < 3
    for path in ("data_movement_friendly", "chunked_prefill"):
        torch.testing.assert_close(run(spec, weights, prefill, normal, path), expanded, rtol=1e-12, atol=1e-12)


def test_every_part_of_a_spec_changes_the_result(prefill: Any, normal: Any) -> None:
    weights = weights_of(EVERYTHING, normal)
    whole = run(EVERYTHING, weights, prefill, normal, "compute_friendly")
    changed: dict[str, Any] = {
        "scale": 0.3, "rotation": None, "q_norm": 0.5, "kv_norm": 0.5, "k_pe_norm": 0.5, "q_factor": 1.0,
        "kv_factor": 1.0, "growth": None, "window": 5,
    }  # fmt: skip
    for name, value in changed.items():
        other = run(replace(EVERYTHING, **{name: value}), weights, prefill, normal, "compute_friendly")
        assert (other - whole).abs().max() > 1e-4, name
    for name in ("q_norm", "kv_norm", "k_pe_norm", "W_G", "sink"):
        shifted = replace(weights, **{name: getattr(weights, name) + 1})
        assert (run(EVERYTHING, shifted, prefill, normal, "compute_friendly") - whole).abs().max() > 1e-4, name


@pytest.mark.parametrize("path", PATHS)
def test_a_window_shows_a_row_itself_and_those_right_before(path: Any, normal: Any) -> None:
    """Each row is what it would be with its window alone; what stands before has no influence, NaN included."""
    spec, window = replace(PLAIN, window=3), 3
    weights, hidden, positions = weights_of(spec, normal), normal(20, 12, 64), torch.arange(12)
    cache = torch.cat(latents(hidden, positions, weights, spec), dim=-1)
    context = PagedContext(cache[:8].clone().unflatten(0, (2, 4)), torch.tensor([[0, 1]]), (8,), workspace_tokens=4)
    starts = {"query_start_loc": (0, 4), "path": path}
    rows = mla_layer(hidden[8:], positions[8:], weights, spec, context=context, **starts)
    for row in range(4):
        seen = slice(8 + row - window + 1, 8 + row)
        alone = PagedContext(cache[None, seen], torch.tensor([[0]]), (window - 1,), workspace_tokens=4)
        one = hidden[8 + row][None], positions[8 + row][None]
        want = mla_layer(*one, weights, PLAIN, context=alone, query_start_loc=(0, 1), path=path)
        torch.testing.assert_close(rows[row], want[0], rtol=1e-12, atol=1e-12)
    context.cache[0] = torch.nan
    again = mla_layer(hidden[8:], positions[8:], weights, spec, context=context, **starts)
    torch.testing.assert_close(again, rows, rtol=0, atol=0)


def test_rms_norm_divides_by_the_root_mean_square_and_queries_grow_by_steps(normal: Any) -> None:
    factors = QueryGrowth(beta=0.1, period=8).factors(torch.tensor([0, 7, 8, 15, 16]))
    steps = [1 + 0.1 * math.log(count) for count in (1, 1, 2, 2, 3)]
    assert factors.tolist() == pytest.approx(steps)
    x, weight = normal(5, 7, 30) * 9, normal(6, 30)
    want = torch.stack([weight * row / (sum(v * v for v in row.tolist()) / 30 + 4.0) ** 0.5 for row in x])
    torch.testing.assert_close(rms_norm(x, weight, 4.0), want, rtol=1e-14, atol=1e-14)


def test_all_tokens_selected_is_no_selection_and_lists_that_do_not_fit_are_refused(prefill: Any, normal: Any) -> None:
    weights = weights_of(PLAIN, normal)
    listed = replace(PLAIN, selects=True)
    lists = torch.full((9, 2), -1)
    for spec, selected, said in ((listed, None, "lists of selected"), (PLAIN, lists, "no lists of selected")):
        with pytest.raises(ValueError, match=f"M-1: expected {said} tokens"):
            run(spec, weights, prefill, normal, "compute_friendly", selected=selected)
    # Any order, -1 between them; a selection within a window is what both leave.
    weights, lens = weights_of(PLAIN, normal), prefill.context.context_lens
    own = torch.tensor([lens[0] + i for i in range(4)] + [0, 1] + [lens[2] + i for i in range(3)])[:, None]
    every = torch.arange(16).flip(0).expand(9, -1)
    every = every.masked_fill(every > own, -1)
    for window in (None, 4):
        seen, listed = replace(PLAIN, window=window), replace(PLAIN, window=window, selects=True)
        for path in PATHS:
            got = run(listed, weights, prefill, normal, path, selected=every)
            torch.testing.assert_close(got, run(seen, weights, prefill, normal, path), rtol=1e-12, atol=1e-12)
