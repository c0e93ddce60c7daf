"""Blocks, masks, dtypes and refusals of `attention`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_conformance.reference.attention as attention_module
from mla_conformance.reference.attention import AttentionState, attention

Normal = Callable[..., Tensor]
BATCH: dict[str, Any] = {"query_start_loc": (0, 4, 4, 9), "key_start_loc": (0, 7, 9, 12), "scale": 0.4}


@pytest.fixture
def qkv(normal: Normal) -> tuple[Tensor, Tensor, Tensor]:
    return normal(1, 9, 4, 6), normal(2, 12, 4, 6), normal(3, 12, 4, 5)


def assert_same(a: AttentionState, b: AttentionState, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(a.output, b.output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.lse, b.lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("workspace", [1, 50, 4 * 12 * 2])
def test_block_size_does_not_show(
    qkv: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch, causal: bool, workspace: int
) -> None:
    whole = attention(*qkv, **BATCH, causal=causal, with_terms=True)
    monkeypatch.setattr(attention_module, "WORKSPACE_ELEMENTS", workspace)
    blocks = attention(*qkv, **BATCH, causal=causal, with_terms=True)
    assert_same(blocks, whole, 1e-14)
    assert blocks.terms is not None and whole.terms is not None
    for name, term in whole.terms.by_name().items():
        torch.testing.assert_close(getattr(blocks.terms, name), term, rtol=1e-14, atol=1e-14)


def test_blocks_stay_within_the_workspace(normal: Normal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "WORKSPACE_ELEMENTS", 1000)
    sizes: list[int] = []
    attend = attention_module._attend

    def spy(q: Tensor, k: Tensor, *rest: Any) -> AttentionState:
        sizes.append(q.shape[0] * q.shape[1] * k.shape[0])
        return attend(q, k, *rest)

    monkeypatch.setattr(attention_module, "_attend", spy)
    q, k, v = normal(1, 64, 2, 3), normal(2, 100, 2, 3), normal(3, 100, 2, 3)
    attention(q, k, v, query_start_loc=(0, 64), key_start_loc=(0, 100), scale=1.0, causal=True)
    assert max(sizes) <= 1000 and len(sizes) == 13


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_invisible_keys_have_no_influence(qkv: tuple[Tensor, ...], poison: float) -> None:
    q, k, v = qkv
    clean = attention(q, k, v, **BATCH, causal=True)
    k, v = k.clone(), v.clone()
    k[6], v[6] = poison, poison  # the last key of request 0: only its last query, row 3, sees it
    k[7:9], v[7:9] = poison, poison  # the keys of request 1, which has no query
    state = attention(q, k, v, **BATCH, causal=True, with_terms=True)
    seen = torch.arange(9) != 3
    torch.testing.assert_close(state.output[seen], clean.output[seen], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(state.lse[:, seen], clean.lse[:, seen], rtol=1e-14, atol=1e-14)
    assert state.output[3].isnan().all()
    assert state.terms is not None and not state.terms.score[seen].isnan().any()


def test_rows_past_the_requests(qkv: tuple[Tensor, ...]) -> None:
    padded = [torch.cat((x, torch.full_like(x[:3], torch.nan))) for x in qkv]
    assert_same(attention(*padded, **BATCH, causal=True), attention(*qkv, **BATCH, causal=True))


@pytest.mark.parametrize("causal", [True, False])
def test_one_shared_head_is_the_same_head_for_all(qkv: tuple[Tensor, ...], causal: bool) -> None:
    q, k, v = qkv[0], qkv[1][:, :1], qkv[2][:, :1]
    everywhere = attention(q, k.expand(-1, 4, -1), v.expand(-1, 4, -1), **BATCH, causal=causal)
    assert_same(attention(q, k, v, **BATCH, causal=causal), everywhere, 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_inputs_are_widened_exactly(qkv: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    narrow = [x.to(dtype) for x in qkv]
    state = attention(*narrow, **BATCH, causal=True)
    assert state.output.dtype == state.lse.dtype == torch.float64
    assert_same(state, attention(*(x.to(torch.float64) for x in narrow), **BATCH, causal=True))


def test_inputs_may_be_strided_and_stay_untouched(normal: Normal) -> None:
    wide = normal(5, 12, 4, 11)
    k, v = wide[..., :6], wide[..., 6:]
    before = wide.clone()
    state = attention(k, k, v, query_start_loc=(0, 12), key_start_loc=(0, 12), scale=0.4, causal=True)
    dense = attention(
        k.contiguous(), k.contiguous(), v.contiguous(), query_start_loc=(0, 12), key_start_loc=(0, 12), scale=0.4,
        causal=True,
    )  # fmt: skip
    assert_same(state, dense, 1e-14)
    assert torch.equal(wide, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": (0, 9)}, "B \\+ 1 entries each"),
        ({"query_start_loc": (0,), "key_start_loc": (0,)}, "B >= 1"),
        ({"query_start_loc": (1, 4, 4, 9)}, "query_start_loc must start at 0"),
        ({"query_start_loc": (0, 4, 3, 9)}, "query_start_loc .* never descend"),
        ({"key_start_loc": (0, 7, 9, 13)}, "key_start_loc .* 12 rows"),
    ],
)
def test_start_locations_are_checked(qkv: tuple[Tensor, ...], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*qkv, **(BATCH | change), causal=True)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((9, 4), (12, 4, 6), (12, 4, 5)), "three dimensions"),
        (((9, 4, 5), (12, 4, 6), (12, 4, 5)), "one width"),
        (((9, 4, 6), (12, 4, 6), (11, 4, 5)), "one number of tokens"),
        (((9, 4, 6), (12, 2, 6), (12, 4, 5)), "4 heads"),
    ],
)
def test_shapes_are_checked(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes), **BATCH, causal=True)
