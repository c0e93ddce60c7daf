"""The outcome of a run as one HTML page that needs no network, no script and no other file."""

from collections.abc import Sequence

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.answer import answers
from mla_conformance.report.budget import closest, distributions
from mla_conformance.report.causes import Cause
from mla_conformance.report.cells import Cell, cell, definition
from mla_conformance.report.closing import closing_line
from mla_conformance.report.heat_picture import picture, words
from mla_conformance.report.shown import shown
from mla_conformance.report.summary import BackendSummary, Outcome, RunSummary
from mla_conformance.report.templates import render
from mla_conformance.report.terminal import SIGN, cases_of, counted, from_here

_CLOSEST = 8


def html(run: RunSummary) -> str:
    """The page."""
    run_backends = [backend for backend in run.backends if not backend.reasons]
    names = list(dict.fromkeys(c.name for backend in run_backends for c in backend.capabilities))
    return render(
        "mla_conformance.report",
        "page.html.j2",
        run=run,
        outcome=_outcome(run),
        closing=closing_line(run),
        judged_backends=run_backends,
        waived=_waived(run),
        verdicts=[(backend, SIGN[backend.outcome], _verdict(backend)) for backend in run.backends],
        seconds=f"{sum(run.seconds.values()):.0f} s",
        refusals=[(backend, refusals) for backend in run_backends if (refusals := _refusals(backend))],
        deployment=str(run.deployment or ""),
        answers=answers(run) if run.deployment else [],
        unavailable=[backend for backend in run.backends if backend.reasons],
        matrix=[(name, definition(name), [_placed(backend, name) for backend in run_backends]) for name in names],
        budget=[(backend, distributions(backend)) for backend in run_backends],
        closest=closest(run_backends, _CLOSEST),
        anchor=_anchor,
        replay=lambda record: from_here(record).replay,
        picture=picture,
        words=words,
        counted=counted,
        cases_of=cases_of,
    )


def _outcome(run: RunSummary) -> str:
    return {0: "pass", 1: "fail"}.get(run.exit_status, "not_run")


def _verdict(backend: BackendSummary) -> str:
    """What is said of a backend in one sentence, with the likely cause of its failures, or what is seen of most."""
    counts = backend.counts
    if backend.causes:
        return f"{counted(counts.failed, 'case')} wrong{_because(backend.causes)}"
    if backend.reasons or backend.not_run:
        return "; ".join(backend.reasons) or backend.not_run
    if backend.outcome is not Outcome.PASS:
        return "nothing was judged"
    rest = [f"{counted(counts.waived, 'case')} wrong as expected"] if counts.waived else []
    rest += [f"{counts.unsupported} unsupported"] if counts.unsupported else []
    rest += [f"{counts.unavailable} unavailable"] if counts.unavailable else []
    return "; ".join([f"{counted(counts.passed, 'case')} right", *rest])


def _because(causes: Sequence[Cause]) -> str:
    first, *others = causes
    part = f", {len(first.failures)} of them" if others else ""
    if first.kind == "likely":
        part = f"{part or ','} most likely because"
    likely = sum(cause.kind == "likely" for cause in others)
    return f"{part}: {first.sentence}" + (f"; {counted(likely, 'other likely cause')}" if likely else "")


def _refusals(backend: BackendSummary) -> list[tuple[str, int, str]]:
    """Why cases are unsupported, the reason for most first: what is said, how many cases, of which capabilities."""
    found: dict[str, list[Record]] = {}
    for record in backend.records:
        if record.status is Status.UNSUPPORTED:
            found.setdefault(record.message, []).append(record)
    rows = [
        (reason, len(records), ", ".join(dict.fromkeys(record.capability for record in records)))
        for reason, records in found.items()
    ]
    return sorted(rows, key=lambda row: -row[1])


def _waived(run: RunSummary) -> list[tuple[str, list[Record]]]:
    """Expected failures by the backend and the expectation that they rest on."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        if record.status is Status.EXPECTED_FAILURE:
            found.setdefault((record.backend, record.expectation), []).append(record)
    return [(reason, records) for (_, reason), records in found.items()]


def _anchor(backend: str, capability: str) -> str:
    return shown(f"{backend}-{capability}")


def _placed(backend: BackendSummary, name: str) -> tuple[Cell, str] | None:
    """A cell of the matrix and where its failures stand, if it has any; None for a capability that was not selected."""
    capability = next((c for c in backend.capabilities if c.name == name), None)
    if capability is None:
        return None
    return cell(capability), _anchor(backend.name, name) if capability.failures else ""
