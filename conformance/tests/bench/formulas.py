"""Ways to compute the same attention, from the golden pass to what other projects' tests compare with.

Sparse attention by its golden pass, and by the definition over all keys with a mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_conformance.reference.attention import (
    WORKSPACE_ELEMENTS,
    AttentionState,
    _attend,
    attention,
    concatenate,
)
from mla_conformance.reference.blockwise import blockwise_attention
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.selected import selected_attention

SCALE = 192**-0.5
"""Factor of the logits."""
_HEAD = PRESETS["r1"].head
_LATENT = PRESETS["r1"].kv_lora_rank
_WIDTH = _LATENT + _HEAD.qk_rope_head_dim


@dataclass(frozen=True)
class Shape:
    """One request of bf16 with the head dims of DeepSeek-R1, causal: new tokens, all keys, and heads."""

    heads: int
    queries: int
    keys: int

    @property
    def operations(self) -> float:
        """Useful operations: q·k and p·v over the visible pairs."""
        pairs = self.queries * (self.queries + 1) / 2 + self.queries * (self.keys - self.queries)
        return 2.0 * (_HEAD.qk_head_dim + _HEAD.v_head_dim) * self.heads * pairs

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.queries} queries, {self.keys} keys, causal"


@dataclass(frozen=True)
class Operands:
    """q [T, N, 192], k [S, N, 192] and v [S, N, 128] of N(0,1), bf16."""

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def of(shape: Shape, device: torch.device) -> "Operands":
        """Drawn on the device."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, width: int) -> Tensor:
            size = (tokens, shape.heads, width)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        wide = _HEAD.qk_head_dim
        return Operands(normal(shape.queries, wide), normal(shape.keys, wide), normal(shape.keys, _HEAD.v_head_dim))


def golden(x: Operands, rows: list[int] | None = None) -> object:
    """The golden pass of the suite: float64, LSE and error terms, in blocks."""
    return blockwise_attention(x.q, x.k, x.v, **_batch(x), scale=SCALE, causal=True, with_terms=True, rows=rows)


def plain(x: Operands) -> object:
    """The definition: float64, LSE and error terms."""
    return attention(x.q, x.k, x.v, **_batch(x), scale=SCALE, causal=True, with_terms=True)


def materialised(x: Operands) -> tuple[Tensor, Tensor]:
    """As flash-attention's and FlashInfer's tests do it: float32, all scores at once, output and LSE."""
    q, k, v = (part.transpose(0, 1).float() for part in (x.q, x.k, x.v))
    scores = (q * SCALE) @ k.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(scores.shape[-1] - q.shape[1] + 1)
    scores.masked_fill_(hidden, -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(0, 1).to(x.q.dtype), scores.logsumexp(dim=-1)


FORMULAS: dict[str, Callable[[Operands], object]] = {"golden": golden, "plain": plain, "float32": materialised}


def _batch(x: Operands) -> dict[str, Any]:
    """One request."""
    return {"query_start_loc": (0, x.q.shape[0]), "key_start_loc": (0, x.k.shape[0])}


@dataclass(frozen=True)
class SparseShape(Shape):
    """One request of bf16 with the latent dims of DeepSeek-R1: each new token selects half of the keys."""

    @property
    def topk(self) -> int:
        """Keys that a row selects."""
        return self.keys // 2

    @property
    def operations(self) -> float:
        """Useful operations: q·k and p·v over the selected pairs."""
        return 2.0 * (_WIDTH + _LATENT) * self.heads * self.queries * self.topk

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.queries} queries, {self.topk} of {self.keys} keys selected"


@dataclass(frozen=True)
class SparseOperands:
    """q [T, N, 576] and kv [S, 1, 576] of N(0,1), bf16, the first 512 columns the value; selected [T, K], different."""

    q: Tensor
    kv: Tensor
    selected: Tensor

    @staticmethod
    def of(shape: SparseShape, device: torch.device) -> "SparseOperands":
        """Drawn on the device."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int) -> Tensor:
            return torch.randn((tokens, heads, _WIDTH), generator=generator, device=device, dtype=torch.bfloat16)

        order = torch.rand((shape.queries, shape.keys), generator=generator, device=device).argsort(dim=1)
        return SparseOperands(
            normal(shape.queries, shape.heads), normal(shape.keys, 1), order[:, : shape.topk].contiguous()
        )


def sparse(x: SparseOperands) -> AttentionState:
    """The golden pass of the suite: float64, LSE and error terms, over the keys that each row selects."""
    return selected_attention(x.q, x.kv, x.kv[..., :_LATENT], x.selected, scale=SCALE, with_terms=True)


def masked(x: SparseOperands) -> AttentionState:
    """The definition over all keys, those masked that a row does not select; results [T·N, 1, V] and [1, T·N].

    All heads share the keys, so that heads are rows of one matrix product instead of a thin product each.
    """
    heads, keys = x.q.shape[1], x.kv.to(torch.float64)
    visible = torch.zeros(len(x.q), len(keys), dtype=torch.bool, device=x.q.device).scatter_(1, x.selected, True)
    rows = max(1, WORKSPACE_ELEMENTS // (heads * len(keys)))
    blocks = []
    for queries, seen in zip(x.q.split(rows), visible.split(rows), strict=True):
        flat = queries.reshape(-1, 1, _WIDTH).to(torch.float64)
        seen = seen.repeat_interleave(heads, dim=0)
        blocks.append(_attend(flat, keys, keys[..., :_LATENT], seen, SCALE, with_terms=True, with_key_terms=False))
    return concatenate(blocks)


SPARSE_FORMULAS: dict[str, Callable[[SparseOperands], object]] = {"sparse": sparse, "masked": masked}
