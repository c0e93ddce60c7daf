"""Ways to compute the same attention, from the golden pass to what other projects' tests compare with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_conformance.reference.attention import attention
from mla_conformance.reference.blockwise import blockwise_attention
from mla_conformance.reference.dimensions import PRESETS

SCALE = 192**-0.5
"""Factor of the logits."""
_HEAD = PRESETS["r1"].head


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
