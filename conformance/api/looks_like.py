"""What failures of functions look like, told by default and therefore within a bound."""

from collections import defaultdict

from mla_conformance.api.own_tests import is_alone, running_test
from mla_conformance.diagnosis.explain import Failure
from mla_conformance.engine.explainer import EXPLAINER
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import ZERO
from mla_conformance.trials.trial import Trial

_FINDINGS: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
"""What the numbers of some failures give away, by test function and by the name of what is judged."""


def with_explanation(trial: Trial, record: Record) -> Record:
    """The record of a failure with what it looks like, unless its numbers say all or it is run again alone."""
    if not record.failed or ZERO in record.message or is_alone():
        return record
    function = running_test().partition("[")[0], trial.subject.name
    if record.finding:
        _FINDINGS[function].add(record.finding)
    if record.finding or not record.is_wrong_number:
        return record
    said = EXPLAINER.explain(function, Failure.of(trial, record))
    same = (finding for finding in _FINDINGS[function] if said.casefold().startswith(finding.casefold()))
    return record.with_fields(explanation=next(same, said))
