"""How much "right" is said of: pairs of classes, claimed and judged; roles, and the page of their caches. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.space import Row
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import counts


@dataclass(frozen=True)
class JudgedPairs:
    claimed: int  # of the cases that the backend declares
    judged: int  # of those that have a verdict
    not_judged: tuple[str, ...]  # the others, each as ``dimension=class · dimension=class``

    def __str__(self) -> str:
        return f"pairs of classes claimed {self.claimed:,}, judged {self.judged:,}"


def judged_pairs(records: Iterable[Record], fitted: Sequence[str]) -> dict[str, JudgedPairs]:
    """By role; nothing of roles whose covering array was not asked, or of which nothing is declared."""
    by_role: dict[str, list[tuple[Sequence[Row], Status]]] = {space.role: [] for space in SPACES.values()}
    counted = [record for record in records if record.capability != EXPLORED and counts(record.capability)]
    arrays = {record.capability for record in counted}
    for record in counted:
        if record.status is not Status.UNSUPPORTED:  # most are, and to parse a case takes longer than all else here
            role, held = _placed(record.case)
            by_role[role].append((held, record.status))
    rows, found = list(map(_placed, fitted)), {}
    for space in (space for name, space in SPACES.items() if name in arrays):
        declared, without = by_role[space.role], (Status.UNAVAILABLE, Status.HARNESS_ERROR)
        judged = Pairs(space, (row for held, status in declared if status not in without for row in held))
        of_cases = (*(held for held, _ in declared), *(held for role, held in rows if role is space.role))
        every = Pairs(space, chain.from_iterable(of_cases))
        if every:
            left = tuple(" · ".join(map("=".join, pair)) for pair in every - judged)
            found[str(space.role)] = JudgedPairs(len(every), len(judged), left)
    return found


@lru_cache(maxsize=2**14)
def _placed(case_id: str) -> tuple[Role, Sequence[Row]]:
    """The role of a case and the classes that it holds, which are asked for again with each backend and each report."""
    case = Case.parse(case_id)
    space = next(space for space in SPACES.values() if space.role is case.role)
    return case.role, tuple(space.rows((case,)))


def total(pairs: Mapping[str, JudgedPairs]) -> JudgedPairs:
    """Over all roles; each pair that was not judged stands behind its role."""
    missing = tuple(f"{role} {pair}" for role, each in pairs.items() for pair in each.not_judged)
    claimed, judged = (sum(getattr(each, name) for each in pairs.values()) for name in ("claimed", "judged"))
    return JudgedPairs(claimed, judged, missing)


OTHER_ROLE = "other"  # of an id that an older suite wrote in another way, or that names no case, nothing is known


def scope_of(cases: Iterable[str]) -> str:
    found = dict.fromkeys(map(_role_and_page, cases))
    roles = dict.fromkeys(role for role, _ in found if role != OTHER_ROLE)
    pages = {page for _, page in found if page}
    return ", ".join([*roles, *(f"page {page}" for page in pages if len(pages) == 1)])


def role_of(case: str) -> str:
    return _role_and_page(case)[0]


@lru_cache(8192)
def _role_and_page(case: str) -> tuple[str, int]:
    """With the tokens of a page of its cache, 0 without one."""
    try:
        parsed = Case.parse(case)
    except ValueError:
        return OTHER_ROLE, 0
    return str(parsed.role), parsed.page if isinstance(parsed, CachedCase) else 0
