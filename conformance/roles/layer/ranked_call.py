"""A call of a layer on several ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch

from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import ProblemError
from mla_conformance.roles.layer.call import LayerCall
from mla_conformance.roles.layer.case import LayerCase


class RanksDriver(Protocol):
    """What the call needs of the ranks under test."""

    def prepare(self, parts: Sequence[LayerCall]) -> None:
        """Weights and metadata of every rank."""

    def forward(self, parts: Sequence[LayerCall]) -> Sequence[Any]:
        """The result of every rank."""


@dataclass(frozen=True, kw_only=True)
class RankedCall(AttentionCall):
    """What ranks that share the tokens do together: their heads side by side are the result of one rank.

    Attributes:
        parts: the call of each rank, of its own heads, with what it holds of the cache.
    """

    parts: tuple[LayerCall, ...]

    @classmethod
    def of(cls, parts: tuple[LayerCall, ...]) -> Self:
        """The call that consists of these."""
        operands = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("q", "k", "v")}
        one = parts[0]
        return cls(parts=parts, **operands, query_start_loc=one.query_start_loc, key_start_loc=one.key_start_loc)

    means: ClassVar = ("q", "k", "v")

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"layer on {len(self.parts)} ranks"

    @property
    def merges(self) -> int:
        """Of stored results: of context chunks in a prefill, of ranks in a decode."""
        return max(self.parts[0].merges, len(self.parts) - 1)

    @property
    def returns_lse(self) -> bool:
        """A layer returns none."""
        return False

    def owned(self) -> dict[str, torch.Tensor]:
        """The operands of each rank."""
        return {f"{name} of rank {p.rank}": tensor for p in self.parts for name, tensor in p.owned().items()}

    @property
    def reached(self) -> Iterable[torch.Tensor]:
        """Operands and cache of each rank."""
        return [tensor for part in self.parts for tensor in part.reached]

    def handed(self) -> Self:
        """The calls of all ranks as they may be known."""
        return replace(super().handed(), parts=tuple(part.handed() for part in self.parts))

    def regrouped(self, case: LayerCase, requests: Sequence[int], queries: int | None) -> Self:
        """Not here: which entries a rank writes goes by the whole batch.

        Raises:
            ProblemError: always.
        """
        raise ProblemError(f"{case.id}: a batch on ranks cannot be regrouped; expected ranks=1 where requests are")

    def overwritten(self, other: Self) -> Self:
        """The other batch, at the addresses of this one."""
        pairs = zip(self.parts, other.parts, strict=True)
        return self.of(tuple(mine.overwritten(theirs) for mine, theirs in pairs))

    def prepare(self, backend: RanksDriver) -> None:
        """Weights and metadata of every rank."""
        backend.prepare(self.parts)

    def invoke(self, backend: RanksDriver, out: Guarded | None) -> Any:
        """[T, N, V] of all heads; what a rank returned, if that is not its heads."""
        results = backend.forward(self.parts)
        expected = (*self.parts[0].q.shape[:2], self.width)
        wrong = [result for result in results if getattr(result, "shape", None) != expected]
        return wrong[0] if wrong else torch.cat(list(results), dim=1)

    def wrong_writes(self) -> str:
        """What one of the ranks wrote wrongly into its cache; empty if there is nothing."""
        wrong = ((part.rank, part.wrong_writes()) for part in self.parts)
        return next((f"on rank {rank}, {what}" for rank, what in wrong if what), "")

    def operands(self) -> AttentionOperands:
        """As of one rank with all heads."""
        return replace(self.parts[0].operands(), q=self.q, k=self.k, v=self.v)
