"""The outcome of a run as Markdown for a CI step summary, and as annotations that GitHub shows at the commit."""

from collections.abc import Iterator

from mla_conformance.judging.record import Record
from mla_conformance.report.summary import BackendSummary, Outcome, RunSummary, worst_of_passes
from mla_conformance.report.terminal import closing_line

SIGN = {
    Outcome.PASS: "✅",
    Outcome.FAIL: "❌",
    Outcome.UNSUPPORTED: "➖",
    Outcome.UNAVAILABLE: "⚪",
    Outcome.NOT_RUN: "❔",
}
_SHOWN_FAILURES = 20


def markdown(run: RunSummary) -> str:
    """A table of the backends, the failures with their replay lines, and what is not in order."""
    lines = ["## MLA conformance", "", _inline(closing_line(run)), "", *_backends(run), ""]
    failures = [record for record in run.records if record.failed]
    lines += [line for record in failures[:_SHOWN_FAILURES] for line in _failure(record)]
    if len(failures) > _SHOWN_FAILURES:
        lines += [f"… and {len(failures) - _SHOWN_FAILURES} more failures, each with its replay line in the report", ""]
    facts = " · ".join(f"{name} {value}" for name, value in run.environment.items())
    return "\n".join([*lines, f"<sub>{_inline(facts)}</sub>", ""])


def _backends(run: RunSummary) -> Iterator[str]:
    yield "| backend | outcome | passed / judged | failed | unsupported | not run | worst error of budget | notes |"
    yield "|---|---|---|---|---|---|---|---|"
    for backend in run.backends:
        yield f"| {' | '.join(_row(backend))} |"


def _row(backend: BackendSummary) -> list[str]:
    sign = f"{SIGN[backend.outcome]} {backend.outcome.value.replace('_', ' ')}"
    if backend.reasons:
        return [_inline(backend.name), sign, "", "", "", "", "", _inline("; ".join(backend.reasons))]
    failing = ", ".join(c.name for c in backend.capabilities if c.outcome is Outcome.FAIL)
    notes = [f"failing: {failing}"] if failing else []
    counts = backend.counts
    notes += [f"{counts.waived} expected to fail"] if counts.waived else []
    notes += [f"{counts.unavailable} unavailable"] if counts.unavailable else []
    notes += [backend.not_run] if backend.stopped and backend.not_run else []
    notes += ["emulated: never certified"] if backend.facts.emulated else []
    numbers = [f"{counts.passed} / {counts.judged}", *map(str, (counts.failed, counts.unsupported, counts.not_run))]
    return [_inline(backend.name), sign, *numbers, f"{worst_of_passes(backend.records):.2f}", _inline("; ".join(notes))]


def _failure(record: Record) -> Iterator[str]:
    yield f"**{_inline(record.backend)} · {record.capability}** · {_inline(record.message)}"
    yield from (f"<br>{_inline(remark)}" for remark in record.remarks)
    yield from ("", "```sh", record.replay, "```", "")


def _inline(text: str) -> str:
    """Text in which nothing is markup, on one line."""
    for character in "\\`*_[]<>|#~":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def annotations(run: RunSummary) -> str:
    """One ``::error`` line for each failure, and one ``::warning`` for each backend that could not be judged."""
    lines = [_annotation(record) for record in run.records if record.failed]
    lines += [
        f"::warning title={_property(f'{backend.name} unavailable')}::{_data('; '.join(backend.reasons))}"
        for backend in run.backends
        if backend.reasons
    ]
    return "".join(f"{line}\n" for line in lines)


def _annotation(record: Record) -> str:
    text = "\n".join(filter(None, (record.message, *record.remarks, f"replay: {record.replay}")))
    return f"::error title={_property(f'{record.backend} {record.capability}')}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
