"""A call of a preparation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.prepare import MLAPrepareBackend, PrepareMetadata
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import rows_of, start_loc
from mla_conformance.roles.prepare.case import PrepareCase


@dataclass(frozen=True, kw_only=True)
class PrepareCall(KernelCall):
    """``run_prepare_index``; q [T, H, D] and k [T, D] are what is handed over.

    Attributes:
        weights: [T, H] float32 or of the model's dtype.
        norm_weight: [D] float32.
        norm_bias: [D] float32.
        metadata: the positions.
        case: what it was made from.
    """

    weights: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    metadata: PrepareMetadata
    case: PrepareCase

    token_dims: ClassVar = (0, 0, 0, 0)

    @property
    def name(self) -> str:
        """How messages call it."""
        return "index preparation"

    @property
    def result_shape(self) -> tuple[int, ...]:
        """That of the codes of queries."""
        return tuple(self.q.shape)

    def owned(self) -> dict[str, torch.Tensor]:
        """The operands, the positions and the table of rotations."""
        named = {name: getattr(self, name) for name in ("q", "k", "weights", "norm_weight", "norm_bias")}
        named |= vars(self.metadata)
        return {f"{name} of {self.name}": x for name, x in named.items()}

    def query_operands(self) -> tuple[torch.Tensor, ...]:
        """All that has a row for each token."""
        return self.q, self.k, self.weights

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Other tokens, at their positions."""
        rows = rows_of(self.query_start_loc, requests).to(self.q.device)
        lengths = [stop - start for start, stop in pairwise(self.query_start_loc)]
        starts = start_loc([lengths[request] for request in requests])
        return replace(
            self,
            q=self.q[rows],
            k=self.k[rows],
            weights=self.weights[rows],
            metadata=replace(self.metadata, positions=self.metadata.positions[rows]),
            query_start_loc=starts,
            key_start_loc=starts,
        )

    def prepare(self, backend: MLAPrepareBackend) -> None:
        """Before every call."""
        backend.prepare_metadata(self.metadata)

    def invoke(self, backend: MLAPrepareBackend, out: Guarded | None) -> Any:
        """The only call."""
        return backend.run_prepare_index(self.q, self.k, self.weights, self.norm_weight, self.norm_bias)
