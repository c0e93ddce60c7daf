"""The last line of a run: backends by what they are, cases by what became of them, and the worst error of a pass."""

from collections import Counter
from collections.abc import Iterator, Sequence

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.answer import Group, answers
from mla_conformance.report.counts import Counts
from mla_conformance.report.summary import RunSummary, worst_of_passes
from mla_conformance.report.terminal import counted

_BACKENDS = {
    Group.RIGHT: "right",
    Group.EMULATED: "right, but emulated",
    Group.WRONG: "wrong",
    Group.WAIVED: "wrong, as expected",
    Group.INCOMPLETE: "incomplete",
    Group.REFUSED: "unsupported",
    Group.UNTESTED: "cannot run here",
}


def closing_line(run: RunSummary) -> str:
    """Every backend and every case is counted once."""
    cases = of_cases(run.counts)
    worst = worst_error(run.records)
    return " · ".join([*_backends(run), f"cases: {cases[0]}", *cases[1:], *([worst] if worst else [])])


def _backends(run: RunSummary) -> Iterator[str]:
    found = Counter(answer.group for answer in answers(run))
    for number, group in enumerate(found):  # as they are told, in the order of the groups
        yield f"{counted(found[group], 'backend') if number == 0 else found[group]} {_BACKENDS[group]}"


def of_cases(counts: Counts) -> list[str]:
    """What became of cases, in figures that add up to all of them."""
    told = [f"{counts.passed} passed", f"{counts.failed} failed", f"{counts.unsupported} unsupported"]
    seldom = (counts.waived, "expected to fail"), (counts.unavailable, "unavailable"), (counts.not_run, "NOT RUN")
    return [*told, *(f"{number} {what}" for number, what in seldom if number)]


def worst_error(records: Sequence[Record]) -> str:
    """How much of its budget the largest error of a passed case used; empty without a pass."""
    if not any(record.status is Status.PASS for record in records):
        return ""
    return f"worst passing error {worst_of_passes(records):.2f} of its budget"
