"""What failures of functions look like, told by default and therefore within a bound."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

from mla_conformance.api.own_tests import is_alone, running_test
from mla_conformance.diagnosis.explain import PATIENCE, WHOLE, ReportedCauses, explain
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import ZERO
from mla_conformance.report.causes import simplicity
from mla_conformance.trials.trial import Trial

_PATIENCE = 10.0
"""Seconds of this thread's CPU time after which a further failure of a function is compared with every candidate only
if it is simpler than all before, so that the simplest one, which is shown in the end, always is."""


@dataclass
class _Explained:
    """What was found of the failures of one function.

    Attributes:
        findings: what the numbers of some give away; an explanation that begins so says the same.
        reported: what those look like that were explained.
        spent: seconds in which others were compared with every candidate.
        compared: the records of those.
    """

    findings: set[str] = field(default_factory=set)
    reported: ReportedCauses = field(default_factory=lambda: ReportedCauses([]))
    spent: float = 0.0
    compared: list[Record] = field(default_factory=list)

    def explain(self, trial: Trial, record: Record) -> str:
        """What an earlier failure looked like if this one does, too; of the first ones, whoever does the same."""
        if said := self.reported.explain(trial, record):
            return said
        is_simplest = all(simplicity(record) < simplicity(other) for other in self.compared)
        if self.spent > _PATIENCE and not is_simplest:
            return ""
        self.compared.append(record)
        started = time.thread_time()
        said = explain(trial, record, WHOLE if is_simplest else PATIENCE)
        self.spent += time.thread_time() - started
        if (explained := record.with_fields(explanation=said)).is_explained:
            self.reported.texts.append(explained.explanation)
        return said


_FOUND: defaultdict[tuple[str, str], _Explained] = defaultdict(_Explained)
"""By test function and by the name of what is judged."""


def with_explanation(trial: Trial, record: Record) -> Record:
    """The record of a failure with what it looks like, unless its numbers say all or it is run again alone."""
    if not record.failed or ZERO in record.message or is_alone():
        return record
    found = _FOUND[running_test().partition("[")[0], trial.subject.name]
    if record.finding:
        found.findings.add(record.finding)
        return record
    said = found.explain(trial, record)
    same = (finding for finding in found.findings if said.casefold().startswith(finding.casefold()))
    return record.with_fields(explanation=next(same, said))
