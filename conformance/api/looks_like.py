"""What failures of functions look like, told by default and therefore within a bound."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

from mla_conformance.api.own_tests import is_alone, running_test
from mla_conformance.diagnosis.explain import ReportedCauses, explain
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import ZERO
from mla_conformance.trials.trial import Trial

_PATIENCE = 10.0
"""Seconds of CPU time after which no further failure of a function is compared with every candidate."""


@dataclass
class _Explained:
    """What was found of the failures of one function.

    Attributes:
        findings: what the numbers of some give away; an explanation that begins so says the same.
        reported: what those look like that were explained.
        spent: seconds of CPU time in which others were compared with every candidate.
    """

    findings: set[str] = field(default_factory=set)
    reported: ReportedCauses = field(default_factory=lambda: ReportedCauses([]))
    spent: float = 0.0

    def explain(self, trial: Trial, record: Record) -> str:
        """What an earlier failure looked like if this one does, too; of the first ones, whoever does the same."""
        if said := self.reported.explain(trial, record):
            return said
        if self.spent > _PATIENCE:
            return ""
        started = time.process_time()
        said = explain(trial, record)
        self.spent += time.process_time() - started
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
