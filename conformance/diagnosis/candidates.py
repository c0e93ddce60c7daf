"""Candidates: everything that a failure is compared with, known defects and mistakes that nobody needs to report."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import chain

from mla_conformance.backends.eager import EagerPrefillBackend, OnlineSoftmax
from mla_conformance.backends.eager_decode import EagerDecodeBackend, EagerTreeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.roles import Role
from mla_conformance.defects.bases import LayeredDecode
from mla_conformance.defects.known import FAMILIES, Emulation, judged_roles, known_defects, reported_bugs, sentence_of
from mla_conformance.diagnosis.suspects import SUSPECTS, each_of

# Nobody knows who wrote what is imported or read once judging has begun.
for _family in FAMILIES:
    import_module(f"mla_conformance.defects.{_family}")
reported_bugs()


@dataclass(frozen=True)
class Candidate:
    """A wrong kernel that a failure may look like."""

    sentence: str  # what is wrong with it
    kernel: type[Emulation]
    roles: tuple[Role, ...]  # that it is judged in
    id: str = ""  # of a known defect; empty for a suspect
    sources: tuple[str, ...] = ()  # public threads that report it
    covers: tuple[str, ...] = ()  # known defects that are this mistake under some condition

    @property
    def reference(self) -> str:
        return f"{self.kernel.__module__}:{self.kernel.__name__}"

    @property
    def reported(self) -> str:
        """What a failure that looks like it is said to be; the numbers of a known defect are those of that defect."""
        source = self.sources[0] if self.sources else ""
        if self.id:
            return f"what the known defect {self.id}{f' ({source})' if source else ''} does: {self.sentence}"
        return self.sentence + (f", like {source}" if source else "")


@cache
def candidates(role: Role) -> tuple[Candidate, ...]:
    """All that serve cases of a role, suspects first."""
    return tuple(candidate for candidate in _everyone() if role in candidate.roles)


@cache
def _everyone() -> tuple[Candidate, ...]:
    # Who touches memory by its address returns what is right, so that no wrong number looks like it; and the address of
    # a GPU's memory, read by this process, would end it.
    known = {id: entry for id, entry in known_defects().items() if entry.killed_by != "memory_bounds"}
    found = list[Candidate]()
    for wrong, covers in chain.from_iterable(map(each_of, SUSPECTS)):
        sources = known[covers[0]].sources if covers else ()
        for kernel, roles in _kernels(wrong):
            found.append(Candidate(sentence_of(wrong), kernel, roles, "", sources, covers))
    return (*found, *(Candidate(x.sentence, x.kernel, x.roles, x.id, x.sources) for x in known.values()))


def _kernels(wrong: type[OnlineSoftmax]) -> Iterator[tuple[type[Emulation], tuple[Role, ...]]]:
    """A kernel of each role with this step, and a layer of both."""
    if issubclass(wrong, EagerPrefillBackend | EagerDecodeBackend | EagerSparseBackend):
        yield wrong, judged_roles(wrong)
        return
    prefill = combined(wrong, EagerPrefillBackend)
    yield prefill, (Role.PREFILL,)
    yield combined(wrong, EagerDecodeBackend), (Role.DECODE,)
    yield combined(wrong, EagerTreeBackend), (Role.TREE,)
    yield combined(wrong, LayeredDecode, prefill_backend=prefill), (Role.LAYER,)
    yield combined(wrong, EagerSparseBackend), (Role.SPARSE,)


def combined(first: type, second: type, **attributes: object) -> type[Emulation]:
    """A kernel that is both classes, where its reference finds it; a TypeError if their bases have no order."""
    module, name = first.__module__, first.__name__ + second.__name__
    kernel = type(name, (first, second), {"__module__": module, **attributes})
    setattr(sys.modules[module], name, kernel)
    return kernel
