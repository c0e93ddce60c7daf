"""The hand-derived vectors under fixtures/golden, and the files themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.fixtures import load, names
from mla_conformance.reference.attention import AttentionState, attention, merge
from mla_conformance.reference.chunking import plan_context_chunks
from mla_conformance.reference.layer import compute_friendly, data_movement_friendly
from mla_conformance.reference.projections import kv_b_proj
from mla_conformance.reference.quantization import quantize_e4m3

ATTENTION = ("equal_logits", "two_token_logistic", "dominant_key", "bottom_right")


def tensors(payload: dict[str, Any], *fields: str) -> list[Tensor]:
    return [torch.tensor(_floats(payload[field]), dtype=torch.float64) for field in fields]


def _floats(nested: Any) -> Any:
    return [_floats(part) for part in nested] if isinstance(nested, list) else float(nested)


def batch(payload: dict[str, Any]) -> dict[str, Any]:
    return {field: payload[field] for field in ("query_start_loc", "key_start_loc", "scale", "causal")}


def assert_golden(state: AttentionState, payload: dict[str, Any]) -> None:
    output, lse = tensors(payload, "output", "lse")
    torch.testing.assert_close(state.output, output, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(state.lse, lse, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    payload = load(name)["payload"]
    assert_golden(attention(*tensors(payload, "q", "k", "v"), **batch(payload)), payload)


def test_latent_mean_by_both_paths() -> None:
    payload = load("latent_mean")["payload"]
    operands = *tensors(payload, "q_nope", "q_pe", "kv_c", "k_pe"), kv_b_proj(*tensors(payload, "w_uk", "w_uv"))
    for route in (compute_friendly, data_movement_friendly):
        assert_golden(route(*operands, **batch(payload)), payload)


def test_merge_e4m3_and_chunk_plan() -> None:
    payload = load("merge")["payload"]
    state = AttentionState(*merge(*tensors(payload, "output_a", "lse_a", "output_b", "lse_b")))
    assert_golden(state, payload)
    payload = load("e4m3")["payload"]
    (values,) = tensors(payload, "value")
    codes = quantize_e4m3(values, payload["scale"]).view(torch.uint8)
    assert codes.tolist() == payload["code"]
    payload = load("chunk_plan")["payload"]
    sizes = {name: payload[name] for name in ("workspace_tokens", "page_size")}
    plan = plan_context_chunks(payload["context_lens"], **sizes)
    assert [list(chunk.starts) for chunk in plan] == payload["starts"]
    assert [list(chunk.seq_lens) for chunk in plan] == payload["seq_lens"]


def test_every_vector_has_a_test_and_others_are_none() -> None:
    tested = *ATTENTION, "chunk_plan", "e4m3", "latent_mean", "merge"
    assert sorted(names()) == sorted(tested)
    with pytest.raises(ValueError, match="bottom_right, chunk_plan"):
        load("nope")
