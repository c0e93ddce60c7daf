"""The outcome of a run as one HTML page that needs no network, no script and no other file."""

from dataclasses import dataclass

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.answer import answers
from mla_conformance.report.budget import closest, distributions
from mla_conformance.report.counts import Counts
from mla_conformance.report.shown import MESSAGE, shown, shown_lines
from mla_conformance.report.summary import BackendSummary, Outcome, RunSummary
from mla_conformance.report.terminal import SIGN, closing_line, counted

_CLOSEST = 8


@dataclass(frozen=True)
class Cell:
    """One capability of one backend in the matrix: its outcome, in words and figures, and where its failures stand."""

    style: str
    sign: str
    counts: str
    note: str
    anchor: str


def html(run: RunSummary) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("mla_conformance.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_shown
    )
    environment.filters["whole"] = _whole
    run_backends = [backend for backend in run.backends if not backend.reasons]
    names = list(dict.fromkeys(c.name for backend in run_backends for c in backend.capabilities))
    return environment.get_template("page.html.j2").render(
        run=run,
        outcome=_outcome(run),
        closing=closing_line(run),
        judged_backends=run_backends,
        waived=_waived(run),
        deployment=str(run.deployment or ""),
        answers=answers(run) if run.deployment else [],
        unavailable=[backend for backend in run.backends if backend.reasons],
        matrix=[(name, _definition(name), [_cell(backend, name) for backend in run_backends]) for name in names],
        budget=[(backend, distributions(backend)) for backend in run_backends],
        closest=closest(run_backends, _CLOSEST),
        anchor=_anchor,
        counted=counted,
    )


def _shown(value: object) -> object:
    """What the template puts out, where it is no markup of its own."""
    return shown_lines(value, MESSAGE) if type(value) is str else value


def _whole(text: str) -> object:
    """A traceback, or a command to copy."""
    from markupsafe import escape

    return escape(shown_lines(text))


def _outcome(run: RunSummary) -> str:
    return {0: "pass", 1: "fail"}.get(run.exit_status, "not_run")


def _waived(run: RunSummary) -> list[tuple[str, list[Record]]]:
    """Expected failures by the backend and the expectation that they rest on."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        if record.status is Status.EXPECTED_FAILURE:
            found.setdefault((record.backend, record.expectation), []).append(record)
    return [(reason, records) for (_, reason), records in found.items()]


def _definition(name: str) -> str:
    if name == EXPLORED:
        return "Cases drawn beyond the list, until one fails."
    return CAPABILITIES[name].definition if name in CAPABILITIES else ""


def _anchor(backend: str, capability: str) -> str:
    return shown(f"{backend}-{capability}")


def _cell(backend: BackendSummary, name: str) -> Cell | None:
    capability = next((c for c in backend.capabilities if c.name == name), None)
    if capability is None:
        return None
    outcome = capability.outcome
    if outcome is Outcome.UNSUPPORTED:
        return Cell(outcome, SIGN[outcome], "", "unsupported", "")
    counts = f"{capability.counts.passed}/{capability.counts.judged}"
    anchor = _anchor(backend.name, name) if capability.failures else ""
    if outcome is Outcome.PASS and capability.counts.waived:
        return Cell("waived", "!", counts, _note(capability.counts), anchor)
    return Cell(outcome, SIGN[outcome], counts, _note(capability.counts), anchor)


def _note(counts: Counts) -> str:
    """What a cell says beside its counts."""
    notes = [f"{counts.not_run} not run"] if counts.not_run else []
    notes += [f"{counts.unavailable} unavailable"] if counts.unavailable else []
    notes += [f"{counts.unsupported} unsupported"] if counts.unsupported else []
    notes += [f"{counts.waived} expected to fail"] if counts.waived else []
    return ", ".join(notes)
