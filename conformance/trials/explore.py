"""What a backend declares of its roles' spaces, and cases drawn from there; what fails is made small, once a cause."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from mla_conformance.cases import covering, fitting, work
from mla_conformance.cases.case import Case
from mla_conformance.cases.space import Space
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import BudgetUse, Status, Verdict
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, OnStarted, judge_one
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import CAPABILITIES, listed

_ROUND = 200  # cases that are drawn with one seed
_MOST_CAUSES = 8
_QUIET, _QUIET_SHARE = 10.0, 0.1  # seconds, and the share of all, after which it is told again how far it is
_Cause = tuple[str, str]  # the call and the check that fails


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
    return answered.value if not answered.error else [False] * len(cases)


def _asked(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    return [not subject.unsupported(case) for case in cases]


def explore(
    subject: Subject,
    draws: int,
    seconds: float,
    capabilities: tuple[str, ...],
    context: Context,
    started: OnStarted = lambda case: None,
    so_far: Callable[[Record], None] = lambda record: None,
) -> Record:
    """The record of a whole exploration: of all cases that hold, or of the causes of failures, each made small.

    ``draws`` cases of each role are drawn, or for so many ``seconds`` over all roles, where the other is 0, of the
    spaces of these ``capabilities``. ``started`` is told of every case before anything of it is launched, ``so_far``
    now and then, ever more rarely, what the record would be if the last case had been the last.
    """
    regions = [region_of(subject, SPACES[name]) for name in capabilities]
    declared = [region for region in regions if region.rows]
    began = told = time.monotonic()

    def judged() -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= max(_QUIET, _QUIET_SHARE * (now - began)):
            told = now
            so_far(_record_of(subject, capabilities, found))

    found = [_Exploration(subject, region, context, started, judged) for region in declared]
    for each in found:
        each.search(draws, time.monotonic() + seconds / len(found) if seconds else 0.0)
    return _record_of(subject, capabilities, found)


def _record_of(subject: Subject, capabilities: tuple[str, ...], found: "list[_Exploration]") -> Record:
    every = [record for each in found for record in each.records.values()]
    judged = [record for record in every if record.status is not Status.UNSUPPORTED]
    causes = [record for each in found for record in each.causes.values()]
    causes = causes or [record for record in judged if record.failed][:1]  # that is being made small
    passed = [record for record in judged if record.status is Status.PASS]
    if causes:
        number = f"{len(causes)} cause{'s' if len(causes) > 1 else ''}"
        said = [f"{number} in {len(judged)} drawn cases, made small: {causes[0].message}"]
        said += [f"{record.check} at {record.case}: {record.message}" for record in causes[1:]]
        told = causes[0].with_fields(message="; ".join(said))
    elif passed:
        shares = [record.shares for record in passed]
        used = BudgetUse(**{rule: max(each[rule] for each in shares) for rule in shares[0]})
        held = f"{len(passed)} of {len(judged)} drawn cases hold, none fails"
        spent = round(sum(record.seconds for record in judged), 4)
        told = passed[-1].with_verdict(Verdict(Status.PASS, held, used=used), spent).with_fields(cases=len(passed))
    else:
        nothing = Verdict(Status.UNSUPPORTED, "declares nothing of what could be drawn")
        empty = Record(subject.backend.name, subject.backend.reference, capabilities[0], "", Status.UNSUPPORTED)
        told = judged[0] if judged else empty.with_verdict(nothing, 0.0)
    return told.with_fields(capability=EXPLORED)


class _CaseFails(Exception):
    """How hypothesis learns that a drawn case, its argument, fails."""


@dataclass
class _Exploration:
    subject: Subject
    region: fitting.Region
    context: Context
    started: OnStarted
    judged: Callable[[], None]
    records: dict[str, Record] = field(default_factory=dict)
    causes: dict[_Cause, Record] = field(default_factory=dict)
    _device_lost: bool = False

    def search(self, draws: int, until: float) -> None:
        """Draw the cases of one seed after another, again behind each cause; what was judged is not judged again."""
        from hypothesis import given, reject, seed

        from mla_conformance.cases.strategies import cases, profile

        def holds(case: Case) -> None:
            if self._fails(case):
                raise _CaseFails(case)
            if case.id in self.records and self.records[case.id].status is Status.UNSUPPORTED:
                reject()

        number = 0
        while (time.monotonic() < until if until else number * _ROUND < draws) and not self._device_lost:
            drawn = given(case=cases(self.region.space, self.region.classes))(holds)
            drawn = seed(number)(profile(min(_ROUND, draws - number * _ROUND) if draws else _ROUND)(drawn))
            while len(self.causes) < _MOST_CAUSES and not self._device_lost:
                self._sought: _Cause | None = None
                try:
                    drawn()
                except _CaseFails as found:
                    (case,) = found.args
                    first = self.records[case.id]
                    # Its smallest case is run once more, where that is possible.
                    again = first if self._device_lost else self._judge(case)
                    passed = first.with_fields(message=f"{first.message}; when run again the case passed")
                    self.causes[_cause(first)] = again if again.failed else passed
                else:
                    break
            number += 1

    def _judge(self, case: Case) -> Record:
        return judge_one(self.subject, case, self.context, self.started)

    def _fails(self, case: Case) -> bool:
        """Whether a case fails by a cause that is not known yet; once one is found, by that one."""
        if case.id not in self.records and not self._device_lost:
            self.records[case.id] = self._judge(case)
            self._device_lost = self.records[case.id].failed and self.subject.executor.lost(self.subject.device)
            self.judged()
        record = self.records.get(case.id)
        if record is None or not record.failed or _cause(record) in self.causes:
            return False
        self._sought = self._sought or _cause(record)
        return self._sought == _cause(record)


def _cause(record: Record) -> _Cause:
    return Case.parse(record.case).call, record.check
