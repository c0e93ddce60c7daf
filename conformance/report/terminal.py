"""The outcome of a run as text for a terminal."""

import sys
from collections.abc import Iterator, Sequence

from mla_conformance.judging.backend_facts import BackendFacts
from mla_conformance.judging.record import Record, describe_failure, detection
from mla_conformance.judging.traced import Traced
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
_SHOWN_KERNELS, _NAME_LENGTH = 2, 60


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
    counts = capability.counts
    text = f"{capability.name} {SIGN[capability.outcome]} {counts.passed}/{counts.judged}"
    if counts.unsupported:
        text += f" ({counts.unsupported} unsupported)"
    if counts.unavailable:
        text += f" ({counts.unavailable} unavailable)"
    return text + (f" ({counts.waived} expected to fail)" if counts.waived else "")


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
    yield from (" " * len(name) + remark for remark in _remarks(backend))


def _remarks(backend: BackendSummary) -> Iterator[str]:
    if backend.stopped and backend.not_run:
        yield backend.not_run
    if backend.facts.rounding:
        yield declared(backend.facts)
    yield from sampled(backend)
    yield from ran(backend.traced)
    if backend.facts.emulated:
        yield "an emulated kernel: judged, never certified"


def declared(facts: BackendFacts) -> str:
    """The rounding classes that a backend declares, all verified by the cases, and how many deviations."""
    classes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.rounding.items())
    return f"declares {classes}; {len(facts.deviations)} deviations, listed in the report"


def ran(traced: Traced) -> Iterator[str]:
    """The kernels that were seen to run, the first few by name; that all of them are torch's, if so."""
    names = traced.distinct
    if names:
        more = f" and {len(names) - _SHOWN_KERNELS} more" if len(names) > _SHOWN_KERNELS else ""
        shown = ", ".join(name[:_NAME_LENGTH] for name in names[:_SHOWN_KERNELS])
        yield f"kernels seen: {shown}{more}"
    elif traced.kernels:
        yield "no kernel of a library was seen to run, only those that torch launches for anybody"


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
        yield from backend_lines(BackendSummary(BackendFacts(name), summarise(group, {})))


def closing_line(run: RunSummary) -> str:
    """The worst use of the error budget and the counts."""
    counts = run.counts
    line = f"worst error {worst_of_passes(run.records):.2f} of budget · {counts.run} run · {counts.failed} failed"
    missing = f" · {counts.not_run} NOT RUN" if counts.not_run else ""
    return f"{line} · {counts.unsupported} unsupported (declared){missing}"


def failure_lines(run: RunSummary) -> Iterator[str]:
    """Every failure with its replay line."""
    for record in run.records:
        if record.failed:
            yield describe_failure(record)
