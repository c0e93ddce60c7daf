"""Exploration: drawn cases for one backend until one of them fails, which is then made as small as it can be."""

from dataclasses import dataclass, field
from functools import partial, reduce

from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.cases.drawn import (
    DRAWN,
    OPTIONS,
    DrawnOption,
    DrawnOptions,
    declared_options,
    options_of,
    plain_case,
)
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import BudgetUse, Nonconformance, Status, Verdict
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import OnStarted, judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial


def explore(
    subject: Subject,
    draws: int,
    capabilities: tuple[str, ...],
    context: Context,
    started: OnStarted = lambda case: None,
) -> Record:
    """The record of a whole exploration: of all cases that hold, or of the smallest one found that fails.

    Args:
        subject: the backend on its device.
        draws: how many cases to draw.
        capabilities: of which capabilities they are.
        context: what this process has made before.
        started: told of every case before anything of it is launched.
    """
    return _Exploration(subject, draws, capabilities, context, started).search().with_fields(capability=EXPLORED)


class _CaseFails(Exception):
    """How hypothesis learns that a drawn case fails."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.id)
        self.case = case


@dataclass
class _Exploration:
    subject: Subject
    draws: int
    capabilities: tuple[str, ...]
    context: Context
    started: OnStarted
    records: dict[str, Record] = field(default_factory=dict)
    _check: str | None = None
    _found_after: int = 0
    _device_lost: bool = False

    def search(self) -> Record:
        from hypothesis import given, reject
        from hypothesis.errors import Unsatisfiable

        from mla_conformance.cases.strategies import cases, profile

        spaces = self._spaces()
        if not spaces:
            return self._unsupported()

        @profile(self.draws)
        @given(case=cases(spaces))
        def holds(case: Case) -> None:
            if self._fails(case):
                raise _CaseFails(case)
            if case.id in self.records and self.records[case.id].status is Status.UNSUPPORTED:
                reject()

        try:
            holds()
        except _CaseFails as found:
            record = self._confirmed(found.case)
            return record.with_fields(message=f"drawn case {self._found_after}, made small: {record.message}")
        except Unsatisfiable:
            pass  # all that was drawn is unsupported
        return self._summed()

    def _summed(self) -> Record:
        """The record of the last case that holds as that of all; of none the first that does not."""
        passed = [record for record in self.records.values() if record.status is Status.PASS]
        if not passed:
            return next(iter(self.records.values()))
        used = reduce(BudgetUse.worst_with, (BudgetUse(**record.shares) for record in passed))
        held = f"{len(passed)} of {self._judged} drawn cases hold, none fails"
        seconds = round(sum(record.seconds for record in self.records.values()), 4)
        return passed[-1].with_verdict(Verdict(Status.PASS, held, used=used), seconds).with_fields(cases=len(passed))

    @property
    def _judged(self) -> int:
        """Distinct cases so far that are not declared unsupported."""
        return sum(record.status is not Status.UNSUPPORTED for record in self.records.values())

    def _spaces(self) -> dict[str, dict[Call, DrawnOptions]]:
        """What the backend declares of the options of each capability's calls; without those it declares nothing of."""
        asked = {call: name for name in self.capabilities for call in DRAWN[name]}
        declared = {
            call: declared_options(OPTIONS[call], partial(self._declares, name, call)) for call, name in asked.items()
        }
        spaces = {
            name: {call: options_of(name, declared[call]) for call in DRAWN[name] if declared[call]}
            for name in self.capabilities
        }
        return {name: calls for name, calls in spaces.items() if calls}

    def _declares(self, capability: str, call: Call, fields: DrawnOption) -> bool:
        try:
            case = plain_case(capability, call, fields)
            trial = Trial(self.subject, case, self.context)
            return not (trial.missing_role() or trial.unsupported())
        except CaseError:
            return False
        except Nonconformance:
            return True

    def _unsupported(self) -> Record:
        """The record of a plain case, by which a backend says that it supports nothing of what could be drawn."""
        name = self.capabilities[0]
        return judge_one(self.subject, plain_case(name, DRAWN[name][0], {}), self.context, self.started)

    def _fails(self, case: Case) -> bool:
        """Whether a case fails; once one has failed, whether it fails the same check."""
        if case.id not in self.records and not self._device_lost:
            record = judge_one(self.subject, case, self.context, self.started)
            self.records[case.id] = record
            self._device_lost = record.failed and self.subject.executor.lost(self.subject.device)
        found = self.records.get(case.id)
        if found is None or not found.failed or self._check not in (None, found.check):
            return False
        if self._check is None:
            self._check, self._found_after = found.check, self._judged
        return True

    def _confirmed(self, case: Case) -> Record:
        """The record of the smallest case, run once more where that is possible."""
        first = self.records[case.id]
        again = first if self._device_lost else judge_one(self.subject, case, self.context, self.started)
        if again.failed:
            return again
        return first.with_fields(message=f"{first.message}; the same case passed when it was run again")
