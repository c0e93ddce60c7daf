"""A call of a cache operation: what it reads, and the memory of its caller that it writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from mla_conformance.cases.cached import CachedCase
from mla_conformance.problems.cache_bytes import CacheImage
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import ProblemError
from mla_conformance.problems.written_entries import WrittenEntries
from mla_conformance.problems.written_rows import WrittenRows


@dataclass(frozen=True, kw_only=True)
class CacheCall(KernelCall):
    """``run_write_latent`` and its siblings; q is [T, 1, L + R] of the model's dtype, k the same, of no token."""

    case: CachedCase
    operands: Mapping[str, torch.Tensor]  # the tensors that it reads, by the names of its arguments
    written: Mapping[str, CacheImage | WrittenRows | WrittenEntries]
    numbers: Mapping[str, int]  # its other arguments
    rank: int = 0  # whose call it is

    means: ClassVar = ("q", "k")

    @property
    def name(self) -> str:
        name = str(self.case.call).replace("_", " ")
        return f"{name} on rank {self.rank}" if self.case.ranks > 1 else name

    @property
    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)

    def owned(self) -> dict[str, torch.Tensor]:
        return {f"{name} of {self.name}": x for name, x in self.operands.items()}

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Not here: what a call writes goes by the whole batch.

        Raises:
            ProblemError: always.
        """
        raise ProblemError(f"{case.id}: the requests of a cache operation cannot be regrouped")

    def invoke(self, backend: Any, out: Guarded | None) -> None:
        """The call that the case names, on memory as it was before."""
        self.reset()
        given = {name: image.cache for name, image in self.written.items()}
        getattr(backend, f"run_{self.case.call}")(**given, **self.operands, **self.numbers)
