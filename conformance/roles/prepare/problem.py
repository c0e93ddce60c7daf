"""From a preparation's case to its call: queries, keys and weights as projections leave them, and rotations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from mla_conformance.backends.prepare import MLAPrepareBackend, PrepareMetadata
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import Draw, lay_out, start_loc
from mla_conformance.reference.rope import plain_frequencies
from mla_conformance.roles.prepare.case import PrepareCase

_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class PrepareCall(KernelCall):
    """``run_prepare_index``; q [T, H, D] and k [T, D] are what is handed over."""

    weights: torch.Tensor  # [T, H] float32 or of the model's dtype
    norm_weight: torch.Tensor  # [D] float32
    norm_bias: torch.Tensor  # [D] float32
    metadata: PrepareMetadata
    case: PrepareCase

    token_dims: ClassVar = (0, 0, 0, 0)
    reads: ClassVar = ("q", "k", "weights", "norm_weight", "norm_bias")
    queries: ClassVar = ("q", "k", "weights")
    per_row: ClassVar = queries

    @property
    def name(self) -> str:
        return "index preparation"

    @property
    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)

    def invoke(self, backend: MLAPrepareBackend, out: Guarded | None) -> Any:
        return backend.run_prepare_index(self.q, self.k, self.weights, self.norm_weight, self.norm_bias)


class PrepareBatch(Draw[PrepareCase]):
    """The batch of a preparation's case."""

    def calls(self) -> tuple[PrepareCall]:
        case, drawn = self.case, KINDS[self.case.data](self._normal(self.case.heads, self.case.head_dim))
        q = self.padded(drawn.to(self.dtype))
        k, weights = self._beside()
        starts = start_loc(case.q)
        only = PrepareCall(
            q=lay_out("q", q, q, case),
            k=k,
            weights=weights,
            norm_weight=(1 + 0.5 * self._normal(case.head_dim)[0]).to(self.device),
            norm_bias=self._normal(case.head_dim)[0].to(self.device),
            metadata=PrepareMetadata(self.positions.to(self.device), self.table.to(self.device)),
            query_start_loc=starts,
            key_start_loc=starts,
            case=case,
        )
        return (only,)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[T] int64, those of rows of padding 0."""
        own = [kv + row for q, kv in zip(self.case.q, self.case.kv, strict=True) for row in range(q)]
        return torch.tensor(own + [0] * self.case.pad, dtype=torch.int64)

    @property
    def table(self) -> torch.Tensor:
        """[P, R] float32, cosines and sines of every position that a token has."""
        frequencies = torch.tensor(plain_frequencies(self.case.rope_dim, _BASE), dtype=torch.float64)
        angle = torch.arange(int(self.positions.max()) + 1, dtype=torch.float64)[:, None] * frequencies
        return torch.cat((angle.cos(), angle.sin()), dim=1).float()

    def _beside(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [T, D], and the weights [T, H] of the model's dtype beside them, or in float32 by themselves."""
        case = self.case
        keys = self.padded(KINDS[case.data](self._normal(case.head_dim)).to(self.dtype))
        weights = self.padded(self._normal(case.heads).to(self.dtype if case.fused else torch.float32))
        if not case.fused:
            return keys, weights
        projected = torch.cat((keys, weights), dim=1)
        return projected[:, : case.head_dim], projected[:, case.head_dim :]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(sum(self.case.q), *shape, generator=self.generator)


def _outliers(x: torch.Tensor) -> torch.Tensor:
    """One column in sixteen a hundred times as large, which the transform spreads over all."""
    return torch.where(torch.arange(x.shape[-1]) % 16 == 3, x * 100, x)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """A mean far from 0, which a LayerNorm takes away and a norm without it does not."""
    return x + 3


def _zeros(x: torch.Tensor) -> torch.Tensor:
    """Every other token is 0 throughout: a block without magnitude, a key without variance."""
    return x * (torch.arange(len(x)) % 2 == 0).reshape(-1, *[1] * (x.dim() - 1))


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "outliers": _outliers,
    "integers": lambda x: (2 * x).round(),
    "shifted": _shifted,
    "tiny_values": lambda x: x * 1e-3,
    "zeros": _zeros,
}
"""Standard normal numbers to queries [T, H, D] and keys [T, D] float32, by the name of the kind."""
