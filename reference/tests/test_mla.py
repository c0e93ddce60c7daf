"""The routes of MLA are one function; the products of the layer: copies are exact, absorption is an identity."""

from typing import Any

import pytest
import torch

from mla_conformance.reference.chunking import plan_context_chunks
from mla_conformance.reference.mla import chunked_prefill, compute_friendly, data_movement_friendly, prepend_context
from mla_conformance.reference.projections import (
    absorb_query,
    expand_key,
    kv_b_proj,
    split_kv_b_proj,
    up_project,
    up_project_output,
)


def test_three_routes_agree(prefill: Any) -> None:
    """Behind a context that comes first, in more than one chunk."""
    starts = {"query_start_loc": prefill.query_start_loc, "scale": prefill.scale}
    kv_c, k_pe, key_start_loc = prepend_context(prefill.kv_c, prefill.k_pe, prefill.query_start_loc, prefill.context)
    assert key_start_loc == (0, 15, 17, 25)
    assert torch.equal(torch.cat((kv_c, k_pe), dim=-1)[17:22], prefill.latents[2])
    assert torch.equal(kv_c[11:15], prefill.kv_c[:4])
    assert len(plan_context_chunks(prefill.context.context_lens, workspace_tokens=8, page_size=4)) == 3
    operands = prefill.q_nope, prefill.q_pe, kv_c, k_pe, prefill.weight_kv_b
    for causal in (True, False):
        expanded, absorbed = (
            route(*operands, **starts, key_start_loc=key_start_loc, causal=causal)
            for route in (compute_friendly, data_movement_friendly)
        )
        chunked = chunked_prefill(*prefill.operands, **starts, context=prefill.context)
        for state in (absorbed, chunked) if causal else (absorbed,):
            torch.testing.assert_close(state.output, expanded.output, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(state.lse, expanded.lse, rtol=1e-12, atol=1e-12)


def test_kv_b_proj_round_trip(normal: Any) -> None:
    w_uk, w_uv = normal(1, 32, 4, 16), normal(2, 32, 4, 12)
    again = split_kv_b_proj(kv_b_proj(w_uk, w_uv), 16)
    assert torch.equal(again[0], w_uk) and torch.equal(again[1], w_uv)
    with pytest.raises(ValueError, match=r"expected 1\.\.27, got 28"):
        split_kv_b_proj(kv_b_proj(w_uk, w_uv), 28)


def test_absorption_moves_a_matrix_across_the_product(normal: Any) -> None:
    q, kv_c, w_uk, w_uv = normal(1, 3, 4, 16), normal(2, 7, 32), normal(3, 32, 4, 16), normal(4, 32, 4, 12)
    up = up_project(kv_c, kv_b_proj(w_uk, w_uv))
    expanded = torch.einsum("tnp,snp->nts", q, up[..., :16])
    absorbed = torch.einsum("tnl,sl->nts", absorb_query(q, w_uk), kv_c)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-12, atol=1e-11)
    p = torch.softmax(expanded, dim=-1)
    late = up_project_output(torch.einsum("nts,sl->tnl", p, kv_c), w_uv)
    torch.testing.assert_close(late, torch.einsum("nts,snv->tnv", p, up[..., 16:]), rtol=1e-12, atol=1e-12)


def test_products_widen_and_copies_keep() -> None:
    narrow = torch.ones(3, 4, 2, dtype=torch.bfloat16)
    key = expand_key(narrow, torch.zeros(3, 2, dtype=torch.bfloat16))
    assert key.dtype == torch.bfloat16 and key.shape == (3, 4, 4) and (key[..., 2:] == 0).all()
    assert up_project(torch.ones(5, 3, dtype=torch.bfloat16), narrow).dtype == torch.float64
