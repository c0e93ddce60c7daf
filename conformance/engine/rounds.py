"""In which order the backends of a run are judged: if it is interrupted, some of them are complete."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mla_conformance.cases.case import Case
from mla_conformance.engine.messages import Explore, Judge

CaseGroup = Sequence[Judge | Explore]
"""Tasks that one worker takes: a case's, of several backends."""


def rounds_of(groups: Iterable[CaseGroup]) -> list[list[CaseGroup]]:
    """The groups in rounds, each of whole roles, after which a backend or more are done.

    First comes the round that completes most backends for what it has to do. Backends of one role stay side by side,
    since they share inputs and golden results.
    """
    by_role, wanted = Counter[str](), defaultdict[str, set[str]](set)
    roles = [(group, _role_of(group)) for group in groups]
    for group, role in roles:
        by_role[role] += 1
        for task in group:
            wanted[task.reference].add(role)
    rounds, left = list[list[CaseGroup]](), dict(wanted)
    while left:
        gains = {frozenset(own): sum(other <= own for other in left.values()) for own in left.values()}
        chosen = max(gains, key=lambda own: gains[own] / sum(map(by_role.__getitem__, own)))
        rounds.append([group for group, role in roles if role in chosen])
        left = {reference: rest for reference, own in left.items() if (rest := own - chosen)}
    return rounds


def alike(groups: Iterable[CaseGroup]) -> list[CaseGroup]:
    """The groups, those side by side for which a library compiles the same, or nearly: of one dtype and dimensions."""

    def compiled_for(group: CaseGroup) -> tuple[str, ...]:
        case = Case.parse(group[0].case) if isinstance(group[0], Judge) else None
        return (case.dtype, case.dims) if case else ()

    return sorted(groups, key=compiled_for)


def _role_of(group: CaseGroup) -> str:
    """The role that a group's case is of; empty where cases are drawn."""
    task = group[0]
    return str(Case.parse(task.case).role) if isinstance(task, Judge) else ""
