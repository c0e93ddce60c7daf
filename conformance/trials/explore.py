"""Exploration: drawn cases for one backend until one of them fails, which is then made as small as it can be."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce

from mla_conformance.cases.case import Case
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import BudgetUse, Check, Nonconformance, Status, Verdict
from mla_conformance.problems.memory import device_lost
from mla_conformance.trials.execute import execute, failing
from mla_conformance.trials.trial import Trial

DRAWN = ("new_tokens", "context_chunk", "chunked_context")
"""Capabilities that cases are drawn of."""


class _CaseFails(Exception):
    """How hypothesis learns that a drawn case fails."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.id)
        self.case = case


@dataclass
class Exploration:
    """Drawn cases for one subject.

    Attributes:
        subject: the backend under test.
        draws: how many cases to draw.
        capabilities: of which capabilities they are.
        start: told of every trial before anything of it is launched.
        verdicts: of all cases so far, by id; a case that is drawn again is not run again.
    """

    subject: Subject
    draws: int
    capabilities: tuple[str, ...]
    start: Callable[[Trial], None]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _check: Check | None = None
    _found_after: int = 0
    _device_lost: bool = False

    def search(self) -> Verdict:
        """A pass, or the verdict of the smallest case found that fails; the last trial started is of that case."""
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
            return self._confirmed(found.case)
        return self._summed() if self._passed else next(iter(self.verdicts.values()))

    def described(self, record: Record) -> Record:
        """The record of the last trial as that of the whole exploration."""
        record = replace(record, capability=EXPLORED)
        if record.failed:
            return replace(record, message=f"drawn case {self._found_after}, made small: {record.message}")
        if not self._passed:
            return record
        return replace(record.with_verdict(self._summed(), record.seconds), cases=len(self._passed))

    @property
    def _passed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts.values() if verdict.status is Status.PASS]

    def _summed(self) -> Verdict:
        used = reduce(BudgetUse.worst_with, (verdict.used for verdict in self._passed))
        held = f"{len(self._passed)} of {len(self.verdicts)} drawn cases hold, none fails"
        return Verdict(Status.PASS, held, used=used)

    def _configurations(self) -> list[tuple[str, str]]:
        """Head dims and dtypes that the backend declares; if it declares none of them, one that it can say so of."""
        from mla_conformance.cases.strategies import CONFIGURATIONS

        return list(filter(self._declared, CONFIGURATIONS)) or list(CONFIGURATIONS[:1])

    def _declared(self, configuration: tuple[str, str]) -> bool:
        dims, dtype = configuration
        try:
            Trial(self.subject, Case.of(capability=DRAWN[0], q=(1,), dims=dims, dtype=dtype)).require_support()
        except Nonconformance as outcome:
            return outcome.verdict.status is not Status.UNSUPPORTED
        return True

    def _fails(self, case: Case) -> bool:
        """Whether a case fails; once one has failed, whether it fails the same check."""
        if case.id not in self.verdicts and not self._device_lost:
            trial = Trial(self.subject, case)
            self.start(trial)
            self.verdicts[case.id] = execute(trial)
            self._device_lost = failing(self.verdicts[case.id]) and device_lost(self.subject.device)
        verdict = self.verdicts.get(case.id)
        if verdict is None or not failing(verdict) or self._check not in (None, verdict.check):
            return False
        if self._check is None:
            self._check, self._found_after = verdict.check, len(self.verdicts)
        return True

    def _confirmed(self, case: Case) -> Verdict:
        """The verdict of the smallest case, run once more where that is possible."""
        first, trial = self.verdicts[case.id], Trial(self.subject, case)
        self.start(trial)
        again = first if self._device_lost else execute(trial)
        if not failing(again):
            again = replace(first, message=f"{first.message}; the same case passed when it was run again")
        trial.verdict = again
        return again
