"""How much "right" is said of: pairs of classes, claimed and judged; roles, and the page of their caches. No torch."""

from collections import Counter
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
from mla_conformance.vocabulary.capabilities import DUE_ON_GPU, counts


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


def right_on(records: Iterable[Record]) -> str:
    """On which cases a kernel is right, role by role, of records of which none failed; empty if it passed none.

    Cases of roles of which nothing was judged do not apply: they are counted apart, as no part of what it is right on.
    """
    by_role: dict[str, Counter[str]] = {}
    pages, others = set[int](), 0
    for record in records:
        role, page = _role_and_page(record.case)
        due = record.status is Status.UNSUPPORTED and record.message.startswith(DUE_ON_GPU)
        by_role.setdefault(role, Counter())[DUE_ON_GPU if due else record.status] += record.cases
        pages |= {page} if page and record.status is Status.PASS else set()
    said = []
    for role, found in by_role.items():
        passed, listed = found.pop(Status.PASS, 0), found.total()
        if not passed:
            others += listed
            continue
        rest = f" ({', '.join(f'{number:,} {why}' for why, number in found.items())})" if found else ""
        said.append(f"{f'{passed:,} of {passed + listed:,}' if found else f'all {passed:,}'} {role} cases{rest}")
    said += [f"page {page} only" for page in pages if len(pages) == 1]
    return ", ".join(said) + (f"; {others:,} of other roles do not apply" if others and said else "")


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
