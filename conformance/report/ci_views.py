"""The outcome of a run for CI systems: Markdown for a step summary, annotations for GitHub, JUnit XML."""

from collections.abc import Iterator
from xml.etree import ElementTree

from mla_conformance.backends.foreign import LINE, cut
from mla_conformance.judging.verdict import Status
from mla_conformance.report.causes import Cause, raised_at
from mla_conformance.report.outcome import answers, closing_line, from_here, worst_of_passes
from mla_conformance.report.summary import BackendOutcome, BackendSummary, RunSummary
from mla_conformance.report.terminal import counted, shown, shown_line, shown_lines

SIGN = dict(zip(BackendOutcome, "✅❌➖⚪❔", strict=True))
_MOST_CAUSES = 7


def markdown(run: RunSummary) -> str:
    """A table of the backends, what is wrong with each with a replay line, and what is not in order."""
    lines = ["## MLA conformance", "", inline(closing_line(run)), ""]
    if run.deployment:
        told = (f"- {each.group}: {inline(each.name)} {inline(said)}" for each, said in answers(run))
        lines += [f"For {inline(str(run.deployment))}:", "", *told, ""]
    lines += [
        "| backend | outcome | passed / judged | failed | unsupported | not run | worst error of budget | notes |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(_row(backend))} |" for backend in run.backends),
        "",
    ]
    for backend in run.backends:
        for cause in backend.causes[:_MOST_CAUSES]:
            name = inline(backend.name)
            lines.append(f"**{name} · {cause.cases}**{cause.reserve} · {inline(cause.headline)}")
            lines += [f"<br>{inline(text)}" for text in _example(cause)]
            lines += ["", "```sh", shown_line(from_here(cause.example).replay), "```", ""]
        if hidden := sum(len(cause.failures) for cause in backend.causes[_MOST_CAUSES:]):
            lines += [f"… and {counted(hidden, 'more case')} of {inline(backend.name)} in the report", ""]
    facts = " · ".join(f"{name} {value}" for name, value in run.environment.items() if value)
    return "\n".join([*lines, f"<sub>{inline(facts)}</sub>", ""])


def _row(backend: BackendSummary) -> list[str]:
    sign = f"{SIGN[backend.outcome]} {backend.outcome.value.replace('_', ' ')}"
    if backend.reasons:
        return [inline(backend.name), sign, "", "", "", "", "", inline("; ".join(backend.reasons))]
    failing = ", ".join(c.name for c in backend.capabilities if c.outcome is BackendOutcome.FAIL)
    notes = [f"failing: {failing}"] if failing else []
    counts = backend.counts
    notes += counts.noted(waived="expected to fail", unavailable="unavailable")
    notes += [backend.not_run] if backend.stopped and backend.not_run else []
    notes += ["emulated: never certified"] if backend.facts.emulated else []
    passed = f"{counts.passed} / {counts.judged}" if counts.judged else "–"
    numbers = [passed, *map(str, (counts.failed, counts.unsupported, counts.not_run))]
    worst = f"{worst_of_passes(backend.records):.2f}" if counts.passed else "–"
    return [inline(backend.name), sign, *numbers, worst, inline("; ".join(notes))]


def _example(cause: Cause) -> Iterator[str]:
    example = cause.example
    return filter(None, (cause.only, f"{example.case}: {example.message}", raised_at(example), example.confirmed))


def inline(text: str) -> str:
    """Text in which nothing is markup, on one line."""
    text = shown(" ".join(cut(text).split()), LINE)
    for character in "\\`*_[]<>|#~":
        text = text.replace(character, "\\" + character)
    return text


def annotations(run: RunSummary) -> str:
    """One ``::error`` line for each cause, and one ``::warning`` for each backend that could not be judged."""

    def line(kind: str, title: str, text: str) -> str:
        return f"::{kind} title={_data(title).replace(':', '%3A').replace(',', '%2C')}::{_data(text)}\n"

    text = ""
    for backend in run.backends:
        for cause in backend.causes:
            replay = f"replay: {from_here(cause.example).replay}"
            title = f"{backend.name}: {cause.cases} of {', '.join(cause.capabilities)}{cause.reserve}"
            text += line("error", title, "\n".join((*map(cut, (cause.headline, *_example(cause))), replay)))
    unavailable = (backend for backend in run.backends if backend.reasons)
    return text + "".join(line("warning", f"{each.name} unavailable", "; ".join(each.reasons)) for each in unavailable)


def _data(text: str) -> str:
    return shown_lines(text).replace("%", "%25").replace("\n", "%0A")


def junit(run: RunSummary) -> str:
    """The XML; a failure carries its replay line, and what was not judged is skipped with its reason."""
    root = ElementTree.Element("testsuites", name="mla-conformance")
    tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    for backend in run.backends:
        tests = []
        for record in backend.records:
            place = {"classname": shown(f"{record.backend}.{record.capability}"), "name": shown(record.case, LINE)}
            tests.append(test := ElementTree.Element("testcase", place, time=f"{record.seconds:.3f}"))
            message = shown(record.message)
            if record.failed:
                broken = (Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR)
                kind = "error" if record.status in broken else "failure"
                what = ElementTree.SubElement(test, kind, message=message, type=shown(record.check or record.status))
                lines = (*map(cut, record.remarks), f"replay: {record.replay}", record.detail)
                what.text = shown_lines("\n".join(filter(None, lines)))
            elif record.status is not Status.PASS:
                said = ": ".join(filter(None, (record.status, record.expectation, record.message)))
                ElementTree.SubElement(test, "skipped", message=shown(said))
        if backend.reasons:
            tests = [ElementTree.Element("testcase", classname=shown(backend.name), name="available", time="0")]
            ElementTree.SubElement(tests[0], "skipped", message=shown("; ".join(backend.reasons)))
        numbers = {name: str(sum(test.find(tag) is not None for test in tests)) for name, tag in tags.items()}
        seconds = f"{sum(record.seconds for record in backend.records):.3f}"
        named = {"name": shown(backend.name), "tests": str(len(tests))}
        ElementTree.SubElement(root, "testsuite", named | numbers | {"time": seconds}).extend(tests)
    ElementTree.indent(root)
    # ASCII, whose declaration is true wherever the text goes: what else there is becomes character references.
    return ElementTree.tostring(root, encoding="us-ascii", xml_declaration=True).decode("ascii") + "\n"
