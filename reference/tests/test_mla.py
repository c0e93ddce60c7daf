"""The three routes are one function."""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.reference.chunking import plan_context_chunks
from mla_conformance.reference.mla import chunked_prefill, compute_friendly, data_movement_friendly, prepend_context


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def unchunked(prefill: Any, route: Any, **options: Any) -> Any:
    kv_c, k_pe, key_start_loc = prepend_context(prefill.kv_c, prefill.k_pe, prefill.query_start_loc, prefill.context)
    return route(
        prefill.q_nope,
        prefill.q_pe,
        kv_c,
        k_pe,
        prefill.weight_kv_b,
        query_start_loc=prefill.query_start_loc,
        key_start_loc=key_start_loc,
        scale=prefill.scale,
        **options,
    )


def test_context_comes_first(prefill: Any) -> None:
    kv_c, k_pe, key_start_loc = prepend_context(prefill.kv_c, prefill.k_pe, prefill.query_start_loc, prefill.context)
    assert key_start_loc == (0, 15, 17, 25)
    assert torch.equal(torch.cat((kv_c, k_pe), dim=-1)[17:22], prefill.latents[2])
    assert torch.equal(kv_c[11:15], prefill.kv_c[:4])


def test_three_routes_agree(prefill: Any) -> None:
    expanded = unchunked(prefill, compute_friendly)
    absorbed = unchunked(prefill, data_movement_friendly)
    chunked = chunked_prefill(
        *prefill.operands, query_start_loc=prefill.query_start_loc, context=prefill.context, scale=prefill.scale
    )
    for state in (absorbed, chunked):
        assert_same(state.output, expanded.output)
        assert_same(state.lse, expanded.lse)


def test_unmasked_routes_agree(prefill: Any) -> None:
    expanded = unchunked(prefill, compute_friendly, causal=False)
    absorbed = unchunked(prefill, data_movement_friendly, causal=False)
    assert_same(absorbed.output, expanded.output)
    assert_same(absorbed.lse, expanded.lse)


def test_the_batch_has_more_than_one_chunk(prefill: Any) -> None:
    assert len(plan_context_chunks(prefill.context.context_lens, workspace_tokens=8, page_size=4)) == 3
