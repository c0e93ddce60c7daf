"""Calls that ranks make together, each of its own heads."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.memory import Guarded


@dataclass(frozen=True, kw_only=True)
class CallOfARank(AttentionCall):
    rank: int = 0  # whose it is


OfARank = TypeVar("OfARank", bound=CallOfARank)


@dataclass(frozen=True, kw_only=True)
class CallOnRanks(AttentionCall, Generic[OfARank]):
    parts: tuple[OfARank, ...]  # the call of each rank, of its own heads, with its own caches

    @classmethod
    def of(cls, parts: tuple[OfARank, ...]) -> Self:
        operands: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("q", "k", "v")
        }
        one = parts[0]
        return cls(parts=parts, **operands, query_start_loc=one.query_start_loc, key_start_loc=one.key_start_loc)

    means: ClassVar = {"q": "T", "k": "S", "v": "S"}

    @property
    def name(self) -> str:
        return f"{self.parts[0].name} on {len(self.parts)} ranks"

    @property
    def returns_lse(self) -> bool:
        return False

    def owned(self) -> dict[str, torch.Tensor]:
        return {f"{name} of rank {p.rank}": tensor for p in self.parts for name, tensor in p.owned().items()}

    @property
    def reached(self) -> Iterable[torch.Tensor]:
        return [tensor for part in self.parts for tensor in part.reached]

    def handed(self) -> Self:
        return replace(super().handed(), parts=tuple(part.handed() for part in self.parts))

    def overwritten(self, other: Self) -> Self:
        pairs = zip(self.parts, other.parts, strict=True)
        return self.of(tuple(mine.overwritten(theirs) for mine, theirs in pairs))

    def prepare(self, backend: Any) -> None:
        backend.prepare(self.parts)

    def invoke(self, backend: Any, out: Guarded | None) -> Any:
        return self.joined(backend.forward(self.parts))

    @abstractmethod
    def joined(self, results: Sequence[Any]) -> Any:
        """The result [T, N, V] of all heads, from that of each rank."""

    def wrong_writes(self) -> str:
        wrong = ((part.rank, part.wrong_writes()) for part in self.parts)
        return next((f"on rank {rank}, {what}" for rank, what in wrong if what), "")

    def operands(self) -> AttentionOperands:
        own = [part.operands() for part in self.parts]
        value_weights = torch.cat([each.value_weights for each in own if each.value_weights is not None])
        return replace(own[0], q=self.q, k=self.k, v=self.v, value_weights=value_weights)
