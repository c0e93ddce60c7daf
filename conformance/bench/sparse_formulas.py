"""Sparse attention by its golden pass, and by the definition over all keys with a mask."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.bench.formulas import SCALE, Shape
from mla_conformance.reference.attention import WORKSPACE_ELEMENTS, AttentionState, _attend, concatenate
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.selected import selected_attention

_LATENT = PRESETS["r1"].kv_lora_rank
_WIDTH = _LATENT + PRESETS["r1"].head.qk_rope_head_dim


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
