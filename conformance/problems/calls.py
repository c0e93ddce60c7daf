"""Calls of a backend's interface, most of them also seen as attention of queries to keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch

from mla_conformance.problems.memory import Guarded
from mla_conformance.reference.terms import Projection


@dataclass(frozen=True)
class AttentionOperands:
    """Operands of the reference's ``attention``, except for the scale.

    Attributes:
        q: [T, N, D].
        k: [S, N, D], or [S, 1, D] shared by all heads.
        v: [S, N, V] or [S, 1, V].
        query_start_loc: first query of each request, and the end.
        key_start_loc: first key of each request, and the end.
        causal: whether query i of a request sees all keys but its last (queries - 1 - i).
        dequantised: whether the keys were stored as codes, so that a kernel may round them once more.
        projection: what k and v are projected from, where projecting rounds.
        value_weights: [N, V], where v is projected: the larger of 1 and Σ |W_UV| over the latents.
        selected: [T, K] int64, the keys that each query attends to, or -1; None where the start locations say it.
        sink: [N], the logit of each head's sink; None without.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    query_start_loc: tuple[int, ...]
    key_start_loc: tuple[int, ...]
    causal: bool
    dequantised: bool = False
    projection: Projection | None = None
    value_weights: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    sink: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class KernelCall(ABC):
    """One call: what it is about, and how a backend is asked.

    Attributes:
        q: [T, N, D].
        k: [S, N, D], or [S, 1, D] shared by all heads.
        query_start_loc: first query of each request, and the end.
        key_start_loc: first key of each request, and the end.
    """

    q: torch.Tensor
    k: torch.Tensor
    query_start_loc: tuple[int, ...]
    key_start_loc: tuple[int, ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """How messages call it."""

    @property
    @abstractmethod
    def result_shape(self) -> tuple[int, ...]:
        """Shape of what the call returns first."""

    token_dims: ClassVar[tuple[int, ...]] = (0, 1)
    """The dimension in which each part of a result counts tokens, as an output and an LSE do."""
    means: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that say what the operands stand for, and are handed to no backend."""

    @property
    def key_lens(self) -> tuple[int, ...]:
        """Keys that a query of each request may see."""
        return tuple(stop - start for start, stop in pairwise(self.key_start_loc))

    @property
    def meant(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k

    @abstractmethod
    def owned(self) -> dict[str, torch.Tensor]:
        """Tensors of this call that a backend may read and must not write, by name."""

    @property
    def reached(self) -> Iterable[torch.Tensor]:
        """Memory that is handed over, and looked at afterwards."""
        return self.owned().values()

    def handed(self) -> Self:
        """The call as a backend may know it: of what its operands mean, the form alone."""
        known = {name: getattr(self, name) for name in self.means}
        return replace(self, **{name: x.to("meta") for name, x in known.items() if x is not None})

    def query_operands(self) -> tuple[torch.Tensor, ...]:
        """The queries as they are handed over, tokens first."""
        return (self.q,)

    @abstractmethod
    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """The given requests in the given order; of new tokens the first ``queries`` of each, where that is not None.

        Args:
            case: what the call was made from.
            requests: numbers of requests.
            queries: new tokens of each that are kept, with their keys; only a prefill is cut.
        """

    def overwritten(self, other: Self) -> Self:
        """This call with the contents of another one of the same shapes, at its own addresses."""
        theirs = other.owned()
        for name, tensor in self.owned().items():
            tensor.copy_(theirs[name])
        return self

    def output_buffer(self) -> Guarded | None:
        """A fresh output tensor for the call; None where it takes none."""
        return None

    @abstractmethod
    def prepare(self, backend: Any) -> None:
        """Hand over what the backend must know before the call, if it was not handed over before an earlier one."""

    @abstractmethod
    def invoke(self, backend: Any, out: Guarded | None) -> Any:
        """Make the call; what the backend returns."""

    def wrong_writes(self) -> str:
        """One sentence about memory that the last call should have written otherwise; empty if there is none."""
        return ""


@dataclass(frozen=True, kw_only=True)
class AttentionCall(KernelCall):
    """A call that asks for attention.

    Attributes:
        v: [S, N, V] or [S, 1, V].
        output_scale: float32 scalar; None where the output is not quantised.
    """

    v: torch.Tensor
    output_scale: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return self.v.shape[-1]

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:2], self.width)

    @property
    def meant(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v

    @property
    def merges(self) -> int:
        """Merges of stored results that the call itself makes."""
        return 0

    @property
    @abstractmethod
    def returns_lse(self) -> bool:
        """Whether the backend is asked for the LSE."""

    @abstractmethod
    def operands(self) -> AttentionOperands:
        """The attention that the call computes."""


def attention_call(call: KernelCall) -> AttentionCall:
    """A call of a problem that asks for attention."""
    assert isinstance(call, AttentionCall), f"{call.name} asks for something else"
    return call
