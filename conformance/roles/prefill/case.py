"""Cases of a prefill backend: new tokens, a chunk of context, or a context in chunks merged with the new tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case, at_least, one_of
from mla_conformance.cases.grammar import CaseError
from mla_conformance.reference.chunking import PLANNERS

_LONGER = 3
MOST_SLICES = 2**18
"""Slices of contexts that a plan may have; those of the suite have up to 138."""


@dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    """A question to a prefill backend.

    Attributes:
        planner: who plans the chunks, a name in the reference's ``PLANNERS``.
        out: whether an output tensor is handed in.
        quant: quantisation of the output.
        oscale: output scale in millionths.
        merge: who merges partial states: the reference, or the backend's own ``merge_attn_states``, into a fresh
            output or ``in_place``, over the state that it merges into.
    """

    role: ClassVar[Role] = Role.PREFILL
    calls: ClassVar[tuple[Call, ...]] = (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT)
    # Ids are older than roles with fields of their own.
    follows: ClassVar[Mapping[str, str]] = {
        "planner": "workspace",
        "out": "lse",
        "quant": "out",
        "oscale": "quant",
        "merge": "inflate",
    }

    planner: str = one_of(PLANNERS, "equal")
    out: bool = False
    quant: str = one_of(("none", "fp8"), "none")
    oscale: int = at_least(1, 13000)
    merge: str = one_of(("golden", "own", "in_place"), "golden")

    @property
    def has_context(self) -> bool:
        """Whether each request has a context, of 0 or more tokens."""
        return self.call != Call.NEW_TOKENS

    @property
    def is_causal(self) -> bool:
        """Whether new tokens attend to each other."""
        return self.call != Call.CONTEXT_CHUNK

    @property
    def is_merged(self) -> bool:
        """Whether a context in chunks is merged with the new tokens."""
        return self.call == Call.CHUNKED_CONTEXT

    @property
    def own_merge(self) -> bool:
        """Whether the backend's own ``merge_attn_states`` merges partial states, not the reference."""
        return self.merge != "golden"

    @property
    def merges_in_place(self) -> bool:
        """Whether that merge is given the running state both as its prefix and as its output."""
        return self.merge == "in_place"

    @property
    def profile(self) -> str:
        """Empty."""
        return ""

    @property
    def asks(self) -> tuple[str, ...]:
        """A quantised output, a merge of its own."""
        return ("quant_output" if self.quant != "none" else "", "own_merge" if self.own_merge else "")

    def varied(self) -> Self:
        """Longer requests in reverse order, with other values."""
        q = tuple(length + _LONGER for length in reversed(self.q))
        return replace(self, q=q, kv=tuple(reversed(self.kv)), seed=self.seed + 1)

    def validate(self) -> None:
        """Hold every field against what it may be; the workspace must hold a page of each request with context.

        Raises:
            CaseError: a value that it may not have, or that another field contradicts.
        """
        super().validate()
        if self.is_merged:
            self._require_few_slices()
            try:
                PLANNERS[self.planner](self.kv, workspace_tokens=self.workspace, page_size=self.page)
            except ValueError as error:
                raise CaseError(f"field workspace: {error}") from error

    def _require_few_slices(self) -> None:
        """Hold the chunks' slices of contexts, as many as equal shares make of them, against a limit.

        Raises:
            CaseError: there are so many that planning them takes long.
        """
        slices = slices_of(self.kv, self.workspace)
        if slices > MOST_SLICES:
            raise CaseError(
                f"field workspace: expected room for contexts in at most {MOST_SLICES:,} slices, got {slices:,}"
            )


def slices_of(contexts: Sequence[int], workspace: int) -> int:
    """Slices of contexts in the chunks that equal shares of a workspace make."""
    with_context = sum(map(bool, contexts))
    share = max(1, workspace // max(1, with_context))
    return len(contexts) * (max(contexts) // share + with_context)
