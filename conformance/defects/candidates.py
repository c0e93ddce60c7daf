"""Candidates: everything that a failure is compared with, known defects and mistakes that nobody needs to report."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.online_softmax import OnlineSoftmax
from mla_conformance.backends.roles import Role
from mla_conformance.defects.known import Judged, KnownDefect, judged_roles, known_defects
from mla_conformance.defects.layered import LayeredDecode

_SUSPECTS: list["Candidate"] = []
_MODULES = ("suspects", "suspects_prefill", "suspects_decode", "suspects_sparse")


@dataclass(frozen=True)
class Candidate:
    """A wrong kernel that a failure may look like.

    Attributes:
        sentence: what is wrong with it.
        family: the kind of fault, named as the families of the known defects.
        kernel: the emulation.
        roles: the roles that it is judged in.
        id: of a known defect; empty for a suspect.
        sources: public threads that report it.
        covers: known defects that are this mistake under some condition.
    """

    sentence: str
    family: str
    kernel: type[Judged]
    roles: tuple[Role, ...]
    id: str = ""
    sources: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """What loads its kernel."""
        return f"{self.kernel.__module__}:{self.kernel.__name__}"

    @property
    def told(self) -> str:
        """What a failure that looks like it is said to be; the numbers of a known defect are those of that defect."""
        source = self.sources[0] if self.sources else ""
        if self.id:
            return f"what the known defect {self.id}{f' ({source})' if source else ''} does: {self.sentence}"
        return self.sentence + (f", like {source}" if source else "")

    @staticmethod
    def of(entry: KnownDefect) -> "Candidate":
        """A known defect as a candidate."""
        return Candidate(entry.sentence, entry.family, entry.kernel, entry.roles, entry.id, entry.sources)


Kernel = type[OnlineSoftmax]


def suspect(family: str, *covers: str) -> Callable[[Kernel], Kernel]:
    """Class decorator that enters a mistake: a wrong kernel, or a wrong step of the softmax that any kernel may have.

    Args:
        family: the kind of fault.
        covers: ids of known defects that are the same mistake.
    """

    def enter(wrong: Kernel) -> Kernel:
        for kernel, roles in _kernels(wrong):
            sentence = (wrong.__doc__ or "").strip().partition("\n")[0].rstrip(".")
            _SUSPECTS.append(Candidate(sentence, family, kernel, roles, covers=covers))
        return wrong

    return enter


def _kernels(wrong: Kernel) -> Iterator[tuple[type[Judged], tuple[Role, ...]]]:
    """A kernel of each role with this step, and a layer of both."""
    if issubclass(wrong, EagerPrefillBackend | EagerDecodeBackend | EagerSparseBackend):
        yield wrong, judged_roles(wrong)
        return
    prefill = _with_step(wrong, EagerPrefillBackend)
    yield prefill, (Role.PREFILL,)
    yield _with_step(wrong, EagerDecodeBackend), (Role.DECODE,)
    yield _with_step(wrong, LayeredDecode, prefill_backend=prefill), (Role.LAYER,)
    yield _with_step(wrong, EagerSparseBackend), (Role.SPARSE,)


def _with_step(step: Kernel, base: type[Judged], **attributes: object) -> type[Judged]:
    """A kernel that takes one step wrongly, where its reference finds it."""
    kernel = type(f"{step.__name__}{base.__name__}", (step, base), {"__module__": step.__module__, **attributes})
    setattr(sys.modules[step.__module__], kernel.__name__, kernel)
    return kernel


@cache
def candidates(role: Role) -> tuple[Candidate, ...]:
    """All that serve cases of a role, suspects first."""
    for name in _MODULES:
        import_module(f"mla_conformance.defects.{name}")
    known = known_defects()
    suspects = [replace(each, sources=known[each.covers[0]].sources) if each.covers else each for each in _SUSPECTS]
    everyone = (*suspects, *map(Candidate.of, known.values()))
    return tuple(candidate for candidate in everyone if role in candidate.roles)
