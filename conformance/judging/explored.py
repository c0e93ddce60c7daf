"""What came of drawn cases, which several workers share; one record of a backend stands for all of them."""

import time
from collections import defaultdict
from functools import reduce

import msgspec

from mla_conformance.backends.references import BackendReference, parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.judging.record import EXPLORED, BudgetUse, Record, Status, Used, Verdict, written

_QUIET, _QUIET_SHARE = 10.0, 0.1  # seconds, and the share of all, after which it is told again how far it is


class Pace:
    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to tell again how far it is, ever more rarely."""
        if (now := time.monotonic()) - self._told < max(_QUIET, _QUIET_SHARE * (now - self._began)):
            return False
        self._told = now
        return True


class Explored(msgspec.Struct, frozen=True):
    judged: int = 0  # cases, without those that were unsupported
    passed: int = 0
    seconds: float = 0.0  # that judging took
    used: Used = {}  # the most of a case that passed
    causes: tuple[Record, ...] = ()  # of failures, one for each call and check, made small
    last: Record | None = None  # one of the cases, the last that passed if any did
    unfinished: str = ""  # why not all were drawn; empty if all were

    @staticmethod
    def of(records: list[Record], causes: list[Record]) -> "Explored":
        judged = [record for record in records if record.status is not Status.UNSUPPORTED]
        passed = [record for record in judged if record.status is Status.PASS]
        causes = causes or [record for record in judged if record.failed][:1]  # that is being made small
        used = reduce(_larger, (record.used for record in passed), Used())
        spent = round(sum(record.seconds for record in judged), 4)
        return Explored(len(judged), len(passed), spent, used, tuple(causes), next(iter((*passed[-1:], *judged)), None))

    def joined(self, other: "Explored") -> "Explored":
        causes = dict[tuple[str, str], Record]()
        for each in (*self.causes, *other.causes):
            causes.setdefault(cause_of(each), each)
        return Explored(
            self.judged + other.judged,
            self.passed + other.passed,
            self.seconds + other.seconds,
            _larger(self.used, other.used),
            tuple(causes.values()),
            other.last if other.passed else self.last or other.last,
            self.unfinished or other.unfinished,
        )

    def record(self, backend: BackendReference) -> Record:
        if self.causes:
            number = f"{len(self.causes)} cause{'s' if len(self.causes) > 1 else ''}"
            first, *others = self.causes
            small = ", made small" if first.status is Status.FAIL else ""  # not of what a process dies of
            said = [f"{number} in {self.judged} drawn cases{small}: {first.message}"]
            said += [f"{record.check or record.status} at {record.case}: {record.message}" for record in others]
            told = first.with_fields(message="; ".join(said))
        elif self.passed and self.last:
            used = BudgetUse(**{rule: float(share) for rule, share in self.used.items()})
            held = f"{self.passed} of {self.judged} drawn cases hold, none fails"
            told = self.last.with_verdict(Verdict(Status.PASS, held, used=used), self.seconds)
            told = told.with_fields(cases=self.passed)
        else:
            nothing = Verdict(Status.UNSUPPORTED, "declares nothing of what could be drawn")
            empty = Record(backend.name, backend.reference, EXPLORED, "", Status.UNSUPPORTED)
            told = self.last or empty.with_verdict(nothing, 0.0)
        if self.unfinished:
            what = f"{told.message}; not all were drawn: {self.unfinished}"
            if not told.failed:
                told = told.with_verdict(Verdict(Status.UNAVAILABLE, what), told.seconds)
            told = told.with_fields(message=what, cases=1)
        return told.with_fields(capability=EXPLORED)


class Explorations:
    """What is known of each backend's exploration, whose parts come in any order and may not come to their end."""

    def __init__(self) -> None:
        self._parts = defaultdict[str, dict[int, Explored]](dict)
        self.pace = Pace()  # of what is told of all parts, each of which has its own

    def keep(self, reference: str, part: int, found: Explored | None, died_of: Record | None = None) -> None:
        """What is known of a part now; of one whose process died what was known before, and of which case it died."""
        known = self._parts[reference].get(part, Explored())
        if died_of:
            died = Explored.of([died_of], [died_of]) if died_of.failed else Explored(unfinished=died_of.message)
            found = known.joined(died)
        self._parts[reference][part] = found or known

    def record(self, reference: str, unfinished: str = "") -> Record:
        parts = (part for _, part in sorted(self._parts[reference].items()))
        return reduce(Explored.joined, parts, Explored(unfinished=unfinished)).record(parse_reference(reference))

    def cut_short(self) -> list[Record]:
        """The records of a run that ended before them."""
        return [self.record(reference, "the run ended before") for reference in self._parts]


def cause_of(record: Record) -> tuple[str, str]:
    """What tells causes of failures apart: the call and the check that fails."""
    return Case.parse(record.case).call, record.check


def _larger(one: Used, other: Used) -> Used:
    return {rule: written(max(float(each.get(rule, 0.0)) for each in (one, other))) for rule in {**one, **other}}
