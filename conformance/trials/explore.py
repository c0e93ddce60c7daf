"""Exploration: drawn cases for one backend until one of them fails, which is then made as small as it can be."""

from dataclasses import dataclass, field, replace
from functools import reduce

from mla_conformance.cases.case import Case
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import BudgetUse, Nonconformance, Status, Verdict
from mla_conformance.problems.memory import device_lost
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import Started, judge_one
from mla_conformance.trials.trial import Trial


def explore(
    subject: Subject, draws: int, capabilities: tuple[str, ...], context: Context, started: Started = lambda case: None
) -> Record:
    """The record of a whole exploration: of all cases that hold, or of the smallest one found that fails.

    Args:
        subject: the backend on its device.
        draws: how many cases to draw.
        capabilities: of which capabilities they are.
        context: what this process has made before.
        started: told of every case before anything of it is launched.
    """
    return replace(_Exploration(subject, draws, capabilities, context, started).search(), capability=EXPLORED)


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
    started: Started
    records: dict[str, Record] = field(default_factory=dict)
    _check: str | None = None
    _found_after: int = 0
    _device_lost: bool = False

    def search(self) -> Record:
        from hypothesis import given

        from mla_conformance.cases.strategies import cases, profile

        @profile(self.draws)
        @given(case=cases(self.capabilities, self._configurations()))
        def holds(case: Case) -> None:
            if self._fails(case):
                raise _CaseFails(case)

        try:
            holds()
        except _CaseFails as found:
            record = self._confirmed(found.case)
            return replace(record, message=f"drawn case {self._found_after}, made small: {record.message}")
        return self._summed()

    def _summed(self) -> Record:
        """The record of the last case that holds as that of all; of none the first that does not."""
        passed = [record for record in self.records.values() if record.status is Status.PASS]
        if not passed:
            return next(iter(self.records.values()))
        used = reduce(BudgetUse.worst_with, (BudgetUse(**record.used) for record in passed))
        held = f"{len(passed)} of {len(self.records)} drawn cases hold, none fails"
        seconds = round(sum(record.seconds for record in self.records.values()), 4)
        return replace(passed[-1].with_verdict(Verdict(Status.PASS, held, used=used), seconds), cases=len(passed))

    def _configurations(self) -> list[tuple[str, str]]:
        """Head dims and dtypes that the backend declares; if it declares none of them, one that it can say so of."""
        from mla_conformance.cases.strategies import CONFIGURATIONS

        return list(filter(self._declared, CONFIGURATIONS)) or list(CONFIGURATIONS[:1])

    def _declared(self, configuration: tuple[str, str]) -> bool:
        dims, dtype = configuration
        case = Case.of(capability=self.capabilities[0], q=(1,), dims=dims, dtype=dtype)
        try:
            return not (self.subject.missing_role(case) or Trial(self.subject, case, self.context).unsupported())
        except Nonconformance:
            return True

    def _fails(self, case: Case) -> bool:
        """Whether a case fails; once one has failed, whether it fails the same check."""
        if case.id not in self.records and not self._device_lost:
            record = judge_one(self.subject, case, self.context, self.started)
            self.records[case.id] = record
            self._device_lost = record.failed and device_lost(self.subject.device)
        found = self.records.get(case.id)
        if found is None or not found.failed or self._check not in (None, found.check):
            return False
        if self._check is None:
            self._check, self._found_after = found.check, len(self.records)
        return True

    def _confirmed(self, case: Case) -> Record:
        """The record of the smallest case, run once more where that is possible."""
        first = self.records[case.id]
        again = first if self._device_lost else judge_one(self.subject, case, self.context, self.started)
        if again.failed:
            return again
        return replace(first, message=f"{first.message}; the same case passed when it was run again")
