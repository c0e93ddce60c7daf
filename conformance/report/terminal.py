"""The outcome of a run as text for a terminal."""

import sys
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from textwrap import TextWrapper

from mla_conformance.judging.backend_facts import BackendFacts
from mla_conformance.judging.record import Record, detection
from mla_conformance.judging.traced import Traced
from mla_conformance.judging.verdict import Status
from mla_conformance.report.causes import Cause
from mla_conformance.report.shown import cut, shown_line
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
    """Print one line at once, whatever is in it."""
    put(shown_line(line), error)


def put(text: str, error: bool = False) -> None:
    """Print what is fit to be shown, or made for machines, as it stands."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


SIGN = {Outcome.PASS: "✔", Outcome.FAIL: "✘", Outcome.UNSUPPORTED: "–", Outcome.NOT_RUN: "?", Outcome.UNAVAILABLE: "?"}
_NAME_WIDTH = 14
_LINE_WIDTH = 118
_TOUCHED = 0.01
_SHOWN_KERNELS, _NAME_LENGTH = 2, 60
_MOST_CAUSES = 7
_INDENT = " " * 7


def header(environment: dict[str, str], cases: int, drawn: int = 0, model: str = "") -> str:
    """One line on where the run takes place, and of what: a tier of all cases, or those of a deployed model."""
    listed = f"{cases} cases" + (f" and {drawn} drawn ones" if drawn else "")
    listed += f" · salt {environment['salt']}" if "salt" in environment else ""
    return (
        f"device {environment['device']} · torch {environment['torch']} · suite {environment['suite']} · "
        f"{model or 'tier ' + environment['tier']} · {listed} · golden float64"
        + (f" · {environment['judge']}" if environment.get("judge") else "")
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
        yield f"{name}unavailable: {cut('; '.join(backend.reasons))}"
        return
    line = name
    for text in map(capability_text, backend.capabilities):
        if len(line) > len(name) and len(line) + len(text) > columns():
            yield line.rstrip()
            line = " " * len(name)
        line += text + "  "
    yield line.rstrip()
    yield from (" " * len(name) + remark for remark in _remarks(backend))


def _remarks(backend: BackendSummary) -> Iterator[str]:
    if backend.stopped and backend.not_run:
        yield cut(backend.not_run)
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


def worst_error(records: Sequence[Record]) -> str:
    """How much of its budget the largest error of a passed case used; without a pass there is none."""
    if not any(record.status is Status.PASS for record in records):
        return "no case passed"
    return f"worst error {worst_of_passes(records):.2f} of budget"


def closing_line(run: RunSummary) -> str:
    """The worst use of the error budget and the counts."""
    counts = run.counts
    line = f"{worst_error(run.records)} · {counts.run} run · {counts.failed} failed"
    missing = f" · {counts.not_run} NOT RUN" if counts.not_run else ""
    return f"{line} · {counts.unsupported} unsupported (declared){missing}"


def cause_lines(run: RunSummary, width: int) -> Iterator[str]:
    """What is wrong with each backend, in lines of ``width`` columns; replay lines stay whole, for copying."""
    for backend in run.backends:
        failed = sum(len(cause.failures) for cause in backend.causes)
        told = backend.causes[:_MOST_CAUSES]
        for number, cause in enumerate(told, start=1):
            head = f"wrong: {backend.name}, {counted(len(backend.causes), 'cause')}, {counted(failed, 'case')}"
            if len(backend.causes) > 1:
                yield from [head] if number == 1 else []
                head = f"    {number}. {counted(len(cause.failures), 'case')}"
            yield from _cause(f"{head}: {cut(cause.sentence)}{cut(cause.extent)}", cause, width)
        if hidden := len(backend.causes) - len(told):
            yield f"    … and {counted(hidden, 'more cause')} in the report"


def _cause(head: str, cause: Cause, width: int) -> Iterator[str]:
    example = cause.example
    said = example.message.removesuffix(f" (SPEC {example.clause})")
    smallest = "" if len(cause.failures) == 1 else "smallest case: "
    details = ["" if said.endswith(cause.sentence) else f"{smallest}{said}", example.confirmed]
    whole = TextWrapper(width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
    yield from whole.wrap(head)
    whole.initial_indent = _INDENT
    for detail in details:
        yield from whole.wrap(cut(detail))
    yield f"{_INDENT}replay: {example.replay}"


def counted(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def columns() -> int:
    """Width of the terminal, or what COLUMNS says; of no use below 60, nor for reading above 140."""
    return min(max(get_terminal_size((_LINE_WIDTH, 24)).columns, 60), 140)
