"""Cases of a prefill backend: new tokens, a chunk of context, or a context in chunks merged with the new tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case, Kind, at_least, given, one_of
from mla_conformance.reference.chunking import PLANNERS

MOST_SLICES = 2**18
"""Slices of contexts that a plan may have; those of the suite have up to 138."""


@dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    """A question to a prefill backend."""

    role: ClassVar[Role] = Role.PREFILL
    calls: ClassVar[tuple[Call, ...]] = (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT)
    longer: ClassVar[Mapping[str, int]] = {"q": 3, "kv": 0}
    asked: ClassVar = {"quant": ("none", "quant_output"), "merge": ("golden", "own_merge")}
    # Ids are older than roles with fields of their own.
    follows: ClassVar[Mapping[str, str]] = {
        "planner": "workspace",
        "out": "lse",
        "quant": "out",
        "oscale": "quant",
        "merge": "inflate",
    }

    planner: str = one_of(PLANNERS, "equal", "who plans the chunks, a name in the reference's `PLANNERS`")
    out: bool = given(False, "whether an output tensor is handed in")
    quant: str = one_of(("none", "fp8"), "none", "quantisation of the output")
    oscale: int = at_least(1, 13000, "output scale in millionths", Kind.SCALE)
    merge: str = one_of(
        ("golden", "own", "in_place"),
        "golden",
        "who merges partial states: the reference, or the backend's own `merge_attn_states`, into a fresh output or "
        "`in_place`, over the state that it merges into",
    )

    @property
    def has_context(self) -> bool:
        return self.call != Call.NEW_TOKENS

    @property
    def is_causal(self) -> bool:
        return self.call != Call.CONTEXT_CHUNK

    @property
    def is_merged(self) -> bool:
        return self.call == Call.CHUNKED_CONTEXT

    @property
    def own_merge(self) -> bool:
        return self.merge != "golden"

    @property
    def merges_in_place(self) -> bool:
        return self.merge == "in_place"

    @property
    def profile(self) -> str:
        return ""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.is_merged:
            return
        slices = slices_of(self.kv, self.workspace)
        if slices > MOST_SLICES:  # of which planning takes long
            yield f"field workspace: expected room for contexts in at most {MOST_SLICES:,} slices, got {slices:,}"
        try:
            PLANNERS[self.planner](self.kv, workspace_tokens=self.workspace, page_size=self.page)
        except ValueError as error:
            yield f"field workspace: {error}"


def slices_of(contexts: Sequence[int], workspace: int) -> int:
    """Slices of contexts in the chunks that equal shares of a workspace make."""
    with_context = sum(map(bool, contexts))
    share = max(1, workspace // max(1, with_context))
    return len(contexts) * (max(contexts) // share + with_context)
