"""Of what a backend declares: the pairs of classes that were claimed, and those that were judged. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.space import Space
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import counts


@dataclass(frozen=True)
class JudgedPairs:
    """Pairs of classes of a role's space.

    Attributes:
        claimed: of the cases that the backend declares.
        judged: of those that have a verdict.
        not_judged: the others, each as ``dimension=class · dimension=class``.
    """

    claimed: int
    judged: int
    not_judged: tuple[str, ...]

    @staticmethod
    def of(space: Space, records: Sequence[Record], fitted: Iterable[Case]) -> "JudgedPairs":
        """Of the records of a role's cases that count, and of the cases that were fitted to it."""
        without = (Status.UNSUPPORTED, Status.UNAVAILABLE, Status.HARNESS_ERROR)
        rows = {record.case: space.row_of(Case.parse(record.case)) for record in records}
        claimed = [rows[record.case] for record in records if record.status is not Status.UNSUPPORTED]
        judged = Pairs(space, [rows[record.case] for record in records if record.status not in without])
        every = Pairs(space, claimed) | Pairs(space, map(space.row_of, fitted))
        return JudgedPairs(len(every), len(judged), tuple(" · ".join(map("=".join, pair)) for pair in every - judged))


def judged_pairs(records: Iterable[Record], fitted: Sequence[str]) -> dict[str, JudgedPairs]:
    """By role; nothing of roles whose covering array was not asked, or of which nothing is declared."""
    by_role: dict[str, list[Record]] = {space.role: [] for space in SPACES.values()}
    arrays = set()
    for record in records:
        if record.capability != EXPLORED and counts(record.capability):
            by_role[Case.parse(record.case).role].append(record)
            arrays.add(record.capability)
    cases = list(map(Case.parse, fitted))
    found = {
        space.role: JudgedPairs.of(space, by_role[space.role], [case for case in cases if case.role is space.role])
        for name, space in SPACES.items()
        if name in arrays
    }
    return {role: pairs for role, pairs in found.items() if pairs.claimed}
