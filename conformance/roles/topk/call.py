"""A call of a top-k."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch

from mla_conformance.backends.topk import MLATopKBackend, TopKMetadata
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import rows_of, start_loc
from mla_conformance.roles.topk.case import TopKCase


@dataclass(frozen=True, kw_only=True)
class TopKCall(KernelCall):
    """``run_top_k_per_row``; q and k are the logits [T, C].

    Attributes:
        metadata: the windows.
        case: what it was made from.
    """

    metadata: TopKMetadata
    case: TopKCase

    @property
    def name(self) -> str:
        """How messages call it."""
        return "top-k"

    @property
    def result_shape(self) -> tuple[int, ...]:
        """A row for each row of logits."""
        return self.q.shape[0], self.case.places

    def owned(self) -> dict[str, torch.Tensor]:
        """The logits and the windows."""
        named = {"logits": self.q, "lengths": self.metadata.lengths, "row starts": self.metadata.row_starts}
        named["token lengths"] = self.metadata.token_lengths
        return {f"{name} of {self.name}": x for name, x in named.items() if x is not None}

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Other rows; a window stays where it is."""
        rows = rows_of(self.query_start_loc, requests).to(self.q.device)
        logits, per_row = self.q[rows], ("lengths", "row_starts", "token_lengths")
        given = {name: getattr(self.metadata, name) for name in per_row}
        metadata = replace(self.metadata, **{name: x[rows] for name, x in given.items() if x is not None})
        lengths = [[stop - start for start, stop in pairwise(at)] for at in (self.query_start_loc, self.key_start_loc)]
        query_start_loc, key_start_loc = (start_loc([each[request] for request in requests]) for each in lengths)
        return replace(
            self,
            q=logits,
            k=logits,
            metadata=metadata,
            query_start_loc=query_start_loc,
            key_start_loc=key_start_loc,
        )

    def prepare(self, backend: MLATopKBackend) -> None:
        """Before every call."""
        backend.prepare_metadata(self.metadata)

    def invoke(self, backend: MLATopKBackend, out: Guarded | None) -> Any:
        """The only call."""
        case = self.case
        if case.pool > 1:
            return backend.run_pool_top_k_per_row(self.q, case.topk, case.pool, case.tail)
        return backend.run_top_k_per_row(self.q, case.topk)
