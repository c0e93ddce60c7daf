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
    capabilities = backend.capabilities
    failing = ", ".join(c.name for c in capabilities if c.outcome is Outcome.FAIL)
    notes = [f"failing: {failing}"] if failing else []
    for what, count in (("expected to fail", "waived"), ("unavailable", "unavailable")):
        cases = sum(getattr(c, count) for c in capabilities)
        notes += [f"{cases} {what}"] if cases else []
    notes += ["emulated: never certified"] if backend.emulated else []
    counts = [f"{sum(c.passed for c in capabilities)} / {sum(c.judged for c in capabilities)}"]
    counts += [str(sum(len(c.failures) for c in capabilities)), str(sum(c.unsupported for c in capabilities))]
    counts += [str(sum(c.not_run for c in capabilities)), f"{worst_of_passes(backend.records):.2f}"]
    return [_inline(backend.name), sign, *counts, _inline("; ".join(notes))]


def _failure(record: Record) -> Iterator[str]:
    yield f"**{_inline(record.backend)} · {record.capability}** · {_inline(record.message)}"
    if record.explanation:
        yield f"<br>{_inline(record.explanation)}"
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
    text = "\n".join(part for part in (record.message, record.explanation, f"replay: {record.replay}") if part)
    return f"::error title={_property(f'{record.backend} {record.capability}')}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
