"""The outcome of a run for others: a step summary, annotations, JUnit XML; an issue for who maintains a kernel."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from mla_conformance.backends.foreign import LINE, cut
from mla_conformance.judging.record import ARITHMETIC, Record, Status, replay_line
from mla_conformance.report import causes, html, outcome, summary
from mla_conformance.report.terminal import counted, shown, shown_line, shown_lines
from mla_conformance.version import __version__

SIGN = dict(zip(summary.BackendOutcome, "✅❌➖⚪❔", strict=True))
_MOST_CAUSES = 7


def markdown(run: summary.RunSummary) -> str:
    """A table of the backends, what is wrong with each with a replay line, and what is not in order."""
    lines = ["## MLA conformance", "", inline(outcome.closing_line(run)), ""]
    if run.deployment:
        told = (f"- {each.group}: {inline(each.name)} {inline(said)}" for each, said in outcome.answers(run))
        lines += [f"For {inline(str(run.deployment))}:", "", *told, ""]
    head = "| backend | outcome | passed / judged | failed | unsupported | not run | worst error of budget | notes |"
    lines += [head, 8 * "|---" + "|", *(f"| {' | '.join(_row(backend))} |" for backend in run.backends), ""]
    for backend in run.backends:
        for cause in backend.causes[:_MOST_CAUSES]:
            name = inline(backend.name)
            lines.append(f"**{name} · {cause.cases}**{cause.reserve} · {inline(cause.headline)}")
            lines += [f"<br>{inline(text)}" for text in _example(cause)]
            lines += ["", "```sh", shown_line(outcome.from_here(cause.example).replay), "```", ""]
        if hidden := sum(len(cause.failures) for cause in backend.causes[_MOST_CAUSES:]):
            lines += [f"… and {counted(hidden, 'more case')} of {inline(backend.name)} in the report", ""]
    facts = " · ".join(f"{name} {value}" for name, value in run.environment.items() if value)
    return "\n".join([*lines, f"<sub>{inline(facts)}</sub>", ""])


def _row(backend: summary.BackendSummary) -> list[str]:
    # What fails in the suite itself alone says nothing of the kernel.
    unjudged = backend.outcome is summary.BackendOutcome.FAIL and backend.group is not summary.Group.WRONG
    status = summary.BackendOutcome.UNAVAILABLE if unjudged else backend.outcome
    sign = f"{SIGN[status]} {status.value.replace('_', ' ')}"
    if backend.reasons:
        return [inline(backend.name), sign, "", "", "", "", "", inline("; ".join(backend.reasons))]
    failing = ", ".join(c.name for c in backend.capabilities if c.outcome is summary.BackendOutcome.FAIL)
    notes = [f"failing: {failing}"] if failing else []
    counts = backend.counts
    notes += counts.noted(waived="expected to fail", unavailable="unavailable")
    notes += [backend.not_run] if backend.stopped and backend.not_run else []
    notes += ["emulated: never certified"] if backend.facts.emulated else []
    passed = f"{counts.passed} / {counts.judged}" if counts.judged else "–"
    numbers = [passed, *map(str, (counts.failed, counts.unsupported, counts.not_run))]
    worst = f"{backend.worst:.2f}" if counts.passed else "–"
    return [inline(backend.name), sign, *numbers, worst, inline("; ".join(notes))]


def _example(cause: causes.Cause) -> Iterator[str]:
    example = cause.example
    told = (cause.only, f"{example.case}: {example.message}", causes.raised_at(example), example.confirmed)
    return filter(None, told)


def inline(text: str) -> str:
    """Text in which nothing is markup, on one line."""
    text = shown(" ".join(cut(text).split()), LINE)
    for character in "\\`*_[]<>|#~":
        text = text.replace(character, "\\" + character)
    return text


def annotations(run: summary.RunSummary) -> str:
    """One ``::error`` line for each cause, and one ``::warning`` for each backend that could not be judged."""

    def line(kind: str, *texts: str) -> str:
        title, text = (shown_lines(each).replace("%", "%25").replace("\n", "%0A") for each in texts)
        return f"::{kind} title={title.replace(':', '%3A').replace(',', '%2C')}::{text}\n"

    text = ""
    for backend in run.backends:
        for cause in backend.causes:
            replay = f"replay: {outcome.from_here(cause.example).replay}"
            title = f"{backend.name}: {cause.cases} of {', '.join(cause.capabilities)}{cause.reserve}"
            text += line("error", title, "\n".join((*map(cut, (cause.headline, *_example(cause))), replay)))
    unavailable = (backend for backend in run.backends if backend.reasons)
    return text + "".join(line("warning", f"{each.name} unavailable", "; ".join(each.reasons)) for each in unavailable)


def junit(run: summary.RunSummary) -> str:
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


_EXPECTED = re.compile(r"\bexpected (.+?)(?=: | × |, wrong in |; the | \(SPEC |$)")
_WITHIN = "Every number is within its error budget around the result in float64, by the declared rounding."
_MOST_CASES = 20
_MACHINE = ("device", "compute_capability", "driver", "torch", "cuda", "python")


@dataclass(frozen=True)
class Issue:
    title: str  # the kernel's name in reports, and what is wrong
    versions: Mapping[str, str]  # of the distributions behind the kernel
    environment: Mapping[str, str]  # suite, device, torch and what else the run tells of the machine
    example: Record  # the failure of the simplest case
    further: tuple[str, ...] = ()  # ids of the other cases that fail of it


def issues_of(run: summary.RunSummary) -> list[Issue]:
    """One for each cause, in the order in which the run prints them, then what its expectations excuse."""
    wrong = [(backend, cause) for backend in run.backends for cause in backend.causes]
    for backend in run.backends:
        excused = [record.as_judged for record in backend.records if record.status is Status.EXPECTED_FAILURE]
        wrong += [(backend, cause) for cause in causes.causes(excused)]
    found = []
    for backend, cause in wrong:
        example, about = outcome.from_here(cause.example), (backend.facts.versions, run.environment)
        further = tuple(record.case for record in cause.failures if record.case != example.case)
        found.append(Issue(f"{backend.name}: {cause.headline}", *about, example, further))
    return found


def issue_text(issue: Issue) -> str:
    example, machine = issue.example, {name: told for name in _MACHINE if (told := issue.environment.get(name))}
    found = {**issue.versions, **machine}
    found["mla-conformance"] = f"{__version__}, suite {issue.environment.get('suite', '')}"
    lines = [f"# {shown_line(issue.title)}", "", "## Versions", ""]
    lines += [f"- {inline(name)} {inline(version)}" for name, version in found.items()]
    lines += ["", "## Reproducer", "", "```sh", shown_line(example.replay), "```", ""]
    if not example.after:
        place = f"{shlex.quote(example.case)} --backend {shlex.quote(example.reference)}"
        lines += ["As a script that needs torch and the library alone, where one call shows it:", ""]
        lines += ["```sh", shown_line(f"mla-conformance export {place} --out reproducer.py"), "```", ""]
    demanded = _WITHIN if example.check in ARITHMETIC else html.definition(example.capability)
    lines += ["## Expected", "", inline(demanded) + (f" (SPEC {example.clause})" if example.clause else "")]
    if expected := _EXPECTED.search(example.message):
        lines += ["", f"Here: {inline(expected[1])}"]
    lines += ["", "## Seen", "", inline(example.message), *(f"<br>{inline(remark)}" for remark in example.remarks), ""]
    if issue.further:
        fail = "fail" if len(issue.further) > 1 else "fails"
        lines += [f"{counted(len(issue.further), 'more case')} {fail} in this way:", "", "```sh"]
        further = (replay_line(case, example.reference, salt=example.salt) for case in issue.further[:_MOST_CASES])
        lines += [*map(shown_line, further), "```"]
        lines += [f"… and {len(issue.further) - _MOST_CASES} more"] if len(issue.further) > _MOST_CASES else []
        lines += [""]
    return "\n".join(lines)
