"""From a preparation's case to its call: queries, keys and weights as projections leave them, and rotations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from mla_conformance.backends.prepare import MLAPrepareBackend, PrepareMetadata
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.operands import Draw, lay_out, start_loc
from mla_conformance.reference.rope import plain_frequencies
from mla_conformance.roles.prepare.case import PrepareCase

_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class PrepareCall(KernelCall):
    """``run_prepare_index``; q [T, H, D] and k [T, D] are what is handed over."""

    metadata: PrepareMetadata
    case: PrepareCase

    name = "index preparation"
    entry = "run_prepare_index"
    token_dims: ClassVar = (0, 0, 0, 0)
    interface: ClassVar = MLAPrepareBackend
    called: ClassVar = {"k_norm_weight": "norm_weight", "k_norm_bias": "norm_bias"}

    @property
    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)


class PrepareBatch(Draw[PrepareCase]):
    """The batch of a preparation's case."""

    def calls(self) -> tuple[PrepareCall]:
        case, starts = self.case, start_loc(self.case.q)
        drawn = self.by_request(KINDS, self._normal(case.heads, case.head_dim), starts)
        q = self.padded(drawn.to(self.dtype))
        k, weights = self._beside()
        q = lay_out("q", q, q, case)
        norm_weight = (1 + 0.5 * self._normal(case.head_dim)[0]).to(self.device)
        norm_bias = self._normal(case.head_dim)[0].to(self.device)
        only = PrepareCall(
            q=q,
            k=k,
            given={"q": q, "k": k, "weights": weights, "k_norm_weight": norm_weight, "k_norm_bias": norm_bias},
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
        keys = self.by_request(KINDS, self._normal(case.head_dim), start_loc(case.q))
        keys = self.padded(keys.to(self.dtype))
        weights = self.padded(self._normal(case.heads).to(self.dtype if case.fused else torch.float32))
        if not case.fused:
            return keys, weights
        projected = torch.cat((keys, weights), dim=1)
        return projected[:, : case.head_dim], projected[:, case.head_dim :]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(sum(self.case.q), *shape, generator=self.generator)


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    # one column in sixteen a hundred times as large, which the transform spreads over all
    "outliers": lambda x: torch.where(torch.arange(x.shape[-1]) % 16 == 3, x * 100, x),
    "integers": lambda x: (2 * x).round(),
    # a mean far from 0, which a LayerNorm takes away and a norm without it does not
    "shifted": lambda x: x + 3,
    "tiny_values": lambda x: x * 1e-3,
    # every other token is 0 throughout: a block without magnitude, a key without variance
    "zeros": lambda x: x * (torch.arange(len(x)) % 2 == 0).reshape(-1, *[1] * (x.dim() - 1)),
}
"""Standard normal numbers to queries [T, H, D] and keys [T, D] float32, by the name of the kind."""
