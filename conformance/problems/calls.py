"""Calls of a backend's interface, each also seen as attention of queries to keys and values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from mla_conformance.problems.memory import Guarded

if TYPE_CHECKING:
    from mla_conformance.problems.problem import Problem


@dataclass(frozen=True)
class Question:
    """Operands of the reference's ``attention``, except for the scale.

    Attributes:
        q: [T, N, D].
        k: [S, N, D], or [S, 1, D] shared by all heads.
        v: [S, N, V] or [S, 1, V].
        query_start_loc: first query of each request, and the end.
        key_start_loc: first key of each request, and the end.
        causal: whether query i of a request sees all keys but its last (queries - 1 - i).
        dequantised: whether the keys were stored as codes, so that a kernel may round them once more.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    query_start_loc: tuple[int, ...]
    key_start_loc: tuple[int, ...]
    causal: bool
    dequantised: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """One call: the attention that it asks for, and how a backend is asked.

    Attributes:
        chunk_idx: the context chunk of a prefill; None where queries attend causally.
        q: [T, N, D].
        k: [S, N, D], or [S, 1, D] shared by all heads.
        v: [S, N, V] or [S, 1, V].
        key_start_loc: first key of each request, and the end.
    """

    chunk_idx: int | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_start_loc: tuple[int, ...]

    @property
    def name(self) -> str:
        """How messages call it."""
        return "new tokens" if self.chunk_idx is None else f"context chunk {self.chunk_idx}"

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.v.shape[-1]

    @property
    def merges(self) -> int:
        """Merges of stored results that the call itself makes."""
        return 0

    def wrong_writes(self) -> str:
        """One sentence about memory that the last call should have written otherwise; empty if there is none."""
        return ""

    def returns_lse(self, problem: "Problem") -> bool:
        """Whether the backend is asked for the LSE."""
        return problem.case.lse or self.chunk_idx is not None

    def judges_lse(self, problem: "Problem") -> bool:
        """Whether the LSE that is returned counts."""
        return self.returns_lse(problem)

    def owned(self) -> dict[str, torch.Tensor]:
        """Tensors of this call that a backend may read and must not write, by name."""
        return {f"{name} of {self.name}": getattr(self, name) for name in ("q", "k", "v")}

    def overwritten(self, other: Self) -> Self:
        """This call with the contents of another one of the same shapes, at its own addresses."""
        theirs = other.owned()
        for name, tensor in self.owned().items():
            tensor.copy_(theirs[name])
        return self

    def prepare(self, backend: Any, problem: "Problem") -> None:
        """Hand over the metadata, if it was not handed over before the problem's first call."""
        raise NotImplementedError

    def invoke(self, backend: Any, problem: "Problem", out: Guarded | None) -> Any:
        """Make the call; what the backend returns."""
        raise NotImplementedError

    def question(self, problem: "Problem") -> Question:
        """The attention that the call computes."""
        return Question(self.q, self.k, self.v, problem.query_start_loc, self.key_start_loc, self.chunk_idx is None)


@dataclass(frozen=True)
class PrefillCall(AttentionCall):
    """A call of a prefill backend; widths P + R and V."""

    def prepare(self, backend: Any, problem: "Problem") -> None:
        """Once for all calls of a problem."""
        if self is problem.calls[0]:
            backend.prepare_metadata(problem.metadata)

    def invoke(self, backend: Any, problem: "Problem", out: Guarded | None) -> Any:
        """``run_prefill_new_tokens`` or ``run_prefill_context_chunk``."""
        if self.chunk_idx is not None:
            return backend.run_prefill_context_chunk(self.chunk_idx, self.q, self.k, self.v)
        optional: dict[str, torch.Tensor] = {}
        if out is not None:
            optional["out"] = out.view
        if problem.output_scale is not None:
            optional["output_scale"] = problem.output_scale
        return backend.run_prefill_new_tokens(self.q, self.k, self.v, return_softmax_lse=problem.case.lse, **optional)
