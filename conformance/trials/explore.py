"""What a backend declares of its roles' spaces, and cases drawn from there; what fails is made small, once a cause."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from mla_conformance.cases import covering, fitting, work
from mla_conformance.cases.case import Case
from mla_conformance.cases.sharding import ROUND, Extent
from mla_conformance.cases.space import Space
from mla_conformance.judging.explored import Explored, Pace, cause_of
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, OnStarted, judge_one
from mla_conformance.vocabulary.capabilities import CAPABILITIES, listed


def region_of(subject: Subject, space: Space, triples: int = 0, salt: str = "") -> fitting.Region:
    """What a backend declares of a space, with cases fitted to it; nothing of a role that cannot run here."""
    cases, most = listed(space), work.CPU_WORK if subject.device.type == "cpu" else work.LARGE_CPU_WORK
    supported = list(compress(cases, _supported(subject, cases)))
    if not supported:
        return fitting.Region(space, [])
    sessions = [case for case in CAPABILITIES[fitting.SESSIONS].cases if case.role is space.role]
    supports, pairs = partial(_supported, subject), reachable(space, most)
    return fitting.fit(space, supported, supports, pairs, most, triples, salt, sessions)


def reachable(space: Space, most: float) -> covering.Pairs:
    """The pairs that listed cases of no more than so much work hold.

    On a GPU heavier ones take half of a run once they are fitted to a kernel, and finding them half a minute.
    """
    return covering.Pairs(space, space.rows(case for case in listed(space) if work.work_of(case) <= most))


def _supported(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    answered = subject.executor.query(partial(_asked, subject, tuple(cases)), list[bool])
    return [False] * len(cases) if answered.error else answered.value


def _asked(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    return [not subject.unsupported(case) for case in cases]


def explore(
    subject: Subject,
    region: fitting.Region,
    extent: Extent,
    turn: tuple[int, int],
    context: Context,
    started: OnStarted = lambda case: None,
    so_far: Callable[[Explored], None] = lambda found: None,
) -> Explored:
    """What came of the cases that are drawn in a turn, (2, 5) for every fifth round from the third on.

    ``started`` is told of every case before anything of it is launched, ``so_far`` now and then, ever more rarely, what
    the answer would be if the last case had been the last.
    """
    exploration = _Exploration(subject, region, context, started, so_far)
    if region.rows:
        exploration.search(extent, turn)
    return exploration.found


class _CaseFails(Exception):
    """How hypothesis learns that a drawn case, its argument, fails."""


@dataclass
class _Exploration:
    subject: Subject
    region: fitting.Region
    context: Context
    started: OnStarted
    so_far: Callable[[Explored], None]
    pace: Pace = field(default_factory=Pace)
    records: dict[str, Record] = field(default_factory=dict)
    causes: dict[tuple[str, str], Record] = field(default_factory=dict)
    _device_lost: bool = False

    @property
    def found(self) -> Explored:
        return Explored.of([*self.records.values()], [*self.causes.values()])

    def search(self, extent: Extent, turn: tuple[int, int]) -> None:
        """Draw the cases of one seed after another, again behind each cause; what was judged is not judged again."""
        from hypothesis import given, reject, seed

        from mla_conformance.cases.strategies import cases, profile

        def holds(case: Case) -> None:
            if self._fails(case):
                raise _CaseFails(case)
            if case.id in self.records and self.records[case.id].status is Status.UNSUPPORTED:
                reject()

        draws, (number, turns), until = extent.draws, turn, time.monotonic() + extent.seconds
        while (time.monotonic() < until if extent.seconds else number * ROUND < draws) and not self._device_lost:
            drawn = given(case=cases(self.region.space, self.region.classes))(holds)
            drawn = seed(number)(profile(min(ROUND, draws - number * ROUND) if draws else ROUND)(drawn))
            while len(self.causes) < 8 and not self._device_lost:
                self._sought: tuple[str, str] | None = None
                try:
                    drawn()
                except _CaseFails as found:
                    (case,) = found.args
                    first = self.records[case.id]
                    # Its smallest case is run once more, where that is possible.
                    again = first if self._device_lost else judge_one(self.subject, case, self.context, self.started)
                    passed = first.with_fields(message=f"{first.message}; when run again the case passed")
                    self.causes[cause_of(first)] = again if again.failed else passed
                else:
                    break
            number += turns

    def _fails(self, case: Case) -> bool:
        """Whether a case fails by a cause that is not known yet; once one is found, by that one."""
        if case.id not in self.records and not self._device_lost:
            self.records[case.id] = judge_one(self.subject, case, self.context, self.started)
            self._device_lost = self.records[case.id].failed and self.subject.executor.lost(self.subject.device)
            if self.pace.is_due():
                self.so_far(self.found)
        record = self.records.get(case.id)
        if record is None or not record.failed or cause_of(record) in self.causes:
            return False
        self._sought = self._sought or cause_of(record)
        return self._sought == cause_of(record)
