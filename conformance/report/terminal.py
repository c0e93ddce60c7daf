"""The outcome of a run as text for a terminal."""

import sys
from collections.abc import Iterator, Sequence

from mla_conformance.judging.record import Record, describe_failure, detection
from mla_conformance.report.summary import (
    BackendSummary,
    CapabilitySummary,
    Outcome,
    RunSummary,
    by_backend,
    summarise,
    worst_of_passes,
)


def say(line: str, error: bool = False) -> None:
    """Print one line at once."""
    print(line, file=sys.stderr if error else sys.stdout, flush=True)


SIGN = {Outcome.PASS: "✔", Outcome.FAIL: "✘", Outcome.UNSUPPORTED: "–", Outcome.NOT_RUN: "?", Outcome.UNAVAILABLE: "?"}
_NAME_WIDTH = 14
_LINE_WIDTH = 118
_TOUCHED = 0.01


def header(environment: dict[str, str], cases: int, drawn: int = 0) -> str:
    """One line on where the run takes place."""
    listed = f"{cases} cases" + (f" and {drawn} drawn ones" if drawn else "")
    return (
        f"device {environment['device']} · torch {environment['torch']} · suite {environment['suite']} · "
        f"tier {environment['tier']} · {listed} · golden float64"
    )


def capability_text(capability: CapabilitySummary) -> str:
    """``name ✔ 12/12``, with what did not count."""
    if capability.outcome is Outcome.UNSUPPORTED:
        return f"{capability.name} – unsupported"
    text = f"{capability.name} {SIGN[capability.outcome]} {capability.passed}/{capability.judged}"
    if capability.unsupported:
        text += f" ({capability.unsupported} unsupported)"
    if capability.unavailable:
        text += f" ({capability.unavailable} unavailable)"
    return text + (f" ({capability.waived} expected to fail)" if capability.waived else "")


def backend_lines(backend: BackendSummary) -> Iterator[str]:
    """A backend's capabilities, wrapped; or why it is unavailable."""
    name = f"{backend.name:<{_NAME_WIDTH}} "
    if backend.reasons:
        yield f"{name}unavailable: {'; '.join(backend.reasons)}"
        return
    line = name
    for text in map(capability_text, backend.capabilities):
        if len(line) > len(name) and len(line) + len(text) > _LINE_WIDTH:
            yield line.rstrip()
            line = " " * len(name)
        line += text + "  "
    yield line.rstrip()
    if backend.rounding:
        yield " " * len(name) + declared(backend)
    yield from (" " * len(name) + line for line in sampled(backend))
    if backend.emulated:
        yield " " * len(name) + "an emulated kernel: judged, never certified"


def declared(backend: BackendSummary) -> str:
    """The rounding classes that the backend declares, all verified by the cases, and how many deviations."""
    classes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in backend.rounding.items())
    return f"declares {classes}; {len(backend.deviations)} deviations, listed in the report"


def sampled(backend: BackendSummary) -> Iterator[str]:
    """How much of the cases was judged of which not every row was."""
    chosen = [record.sampled for record in backend.records if record.sampled]
    if chosen:
        least = min(chosen, key=lambda rows: rows["rows"] / rows["of"])
        seen = min(detection(rows["drawn"], _TOUCHED) for rows in chosen)
        yield (
            f"{len(chosen)} cases judged by chosen rows, at least {least['rows']} of {least['of']} with every head; "
            f"a defect in {_TOUCHED:.0%} of the rows is among them with probability {seen:.3f}"
        )


def capability_lines(records: Sequence[Record]) -> Iterator[str]:
    """Backends and capabilities of a bare list of records, as at the end of a pytest run."""
    for name, group in by_backend(records).items():
        yield from backend_lines(BackendSummary(name, (), {}, False, (), {}, summarise(group, {})))


def closing_line(run: RunSummary) -> str:
    """The worst use of the error budget and the counts."""
    capabilities = [capability for backend in run.backends for capability in backend.capabilities]
    failed = sum(len(c.failures) for c in capabilities)
    unsupported = sum(c.unsupported for c in capabilities)
    not_run = sum(c.not_run for b in run.backends if not b.reasons for c in b.capabilities)
    judged = sum(record.cases for record in run.records)
    line = f"worst error {worst_of_passes(run.records):.2f} of budget · {judged} run · {failed} failed"
    return f"{line} · {unsupported} unsupported (declared)" + (f" · {not_run} NOT RUN" if not_run else "")


def failure_lines(run: RunSummary) -> Iterator[str]:
    """Every failure with its replay line."""
    for record in run.records:
        if record.failed:
            yield describe_failure(record)
