"""A cell of a matrix of capabilities: its outcome in words and figures. No torch."""

from dataclasses import dataclass

from mla_conformance.judging.record import EXPLORED
from mla_conformance.report.counts import Counts
from mla_conformance.report.summary import CapabilitySummary, Outcome
from mla_conformance.report.terminal import SIGN
from mla_conformance.vocabulary.capabilities import CAPABILITIES


@dataclass(frozen=True)
class Cell:
    """One capability of one backend: its outcome as a class of styles, a sign, figures and words."""

    style: str
    sign: str
    counts: str
    note: str


def cell(capability: CapabilitySummary) -> Cell:
    """The cell of a capability."""
    outcome, counts = capability.outcome, capability.counts
    if outcome is Outcome.UNSUPPORTED:
        return Cell(outcome, SIGN[outcome], "", "unsupported")
    figures = f"{counts.passed}/{counts.judged}"
    if outcome is Outcome.PASS and counts.waived:
        return Cell("waived", "!", figures, _note(counts))
    return Cell(outcome, SIGN[outcome], figures, _note(counts))


def _note(counts: Counts) -> str:
    """What a cell says beside its counts."""
    notes = [f"{counts.not_run} not run"] if counts.not_run else []
    notes += [f"{counts.unavailable} unavailable"] if counts.unavailable else []
    notes += [f"{counts.unsupported} unsupported"] if counts.unsupported else []
    notes += [f"{counts.waived} expected to fail"] if counts.waived else []
    return ", ".join(notes)


def definition(name: str) -> str:
    """What a capability says, in one sentence; empty for one that this suite does not have."""
    if name == EXPLORED:
        return "Cases drawn beyond the list, until one fails."
    return CAPABILITIES[name].definition if name in CAPABILITIES else ""
