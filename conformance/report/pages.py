"""What HTML pages have in common: templates in one look, texts escaped and cut, cells of a matrix of capabilities."""

from dataclasses import dataclass
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from mla_conformance.judging.record import EXPLORED
from mla_conformance.report.summary import FORESEEN, SIGN, BackendOutcome, CapabilitySummary
from mla_conformance.report.terminal import MESSAGE, shown_lines
from mla_conformance.vocabulary.capabilities import CAPABILITIES


def render(room: str, template: str, **values: Any) -> str:
    """A page of a room, the package that holds the template and may hold what that imports; all names must be given."""
    loader = ChoiceLoader([PackageLoader(package, ".") for package in (room, "mla_conformance.report")])
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_shown
    )
    environment.filters["whole"] = lambda text: escape(shown_lines(text))  # a traceback, or a command to copy
    return environment.get_template(template).render(**values)


def _shown(value: object) -> object:
    """What the template puts out, where it is no markup of its own."""
    return shown_lines(value, MESSAGE) if type(value) is str else value


@dataclass(frozen=True)
class Cell:
    """One capability of one backend: its outcome as a class of styles, a sign, figures and words."""

    style: str
    sign: str
    counts: str
    note: str


def cell(capability: CapabilitySummary) -> Cell:
    outcome, counts = capability.outcome, capability.counts
    if outcome is BackendOutcome.UNSUPPORTED:
        return Cell(outcome, SIGN[outcome], "", "unsupported")
    style, sign = (
        ("waived", FORESEEN) if outcome is BackendOutcome.PASS and counts.waived else (outcome.value, SIGN[outcome])
    )
    notes = counts.noted(
        not_run="not run", unavailable="unavailable", unsupported="unsupported", waived="expected to fail"
    )
    return Cell(style, sign, f"{counts.passed}/{counts.judged}", ", ".join(notes))


def definition(name: str) -> str:
    """What a capability says, in one sentence; empty for one that this suite does not have."""
    if name == EXPLORED:
        return "Cases drawn beyond the list, until one fails."
    return CAPABILITIES[name].definition if name in CAPABILITIES else ""
