"""An issue for whoever maintains a kernel: what is wrong with which version, how to see it, what is expected."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mla_conformance.judging.record import Record, replay_line
from mla_conformance.judging.verdict import ARITHMETIC, Status
from mla_conformance.report.causes import Cause, causes
from mla_conformance.report.ci_views import inline
from mla_conformance.report.html import definition
from mla_conformance.report.outcome import from_here
from mla_conformance.report.summary import BackendSummary, RunSummary
from mla_conformance.report.terminal import counted, shown_line
from mla_conformance.version import __version__

_EXPECTED = re.compile(r"\bexpected (.+?)(?=: | × |, wrong in |; the | \(SPEC |$)")
_WITHIN = "Every number is within its error budget around the result in float64, by the declared rounding."
_MOST_CASES = 20
_MACHINE = ("device", "compute_capability", "driver", "torch", "cuda", "python")


@dataclass(frozen=True)
class Issue:
    kernel: str  # name in reports
    sentence: str  # what is wrong
    versions: Mapping[str, str]  # of the distributions behind the kernel
    environment: Mapping[str, str]  # device, torch and what else the run tells of the machine
    suite: str  # version of the suite that found it
    example: Record  # the failure of the simplest case
    further: tuple[str, ...] = ()  # ids of the other cases that fail of it

    @property
    def title(self) -> str:
        return f"{self.kernel}: {self.sentence}"


def issues_of(run: RunSummary) -> list[Issue]:
    """One for each cause, in the order in which the run prints them, then what its expectations excuse."""
    wrong = [_of_cause(cause, backend, run) for backend in run.backends for cause in backend.causes]
    for backend in run.backends:
        excused = [record.as_judged for record in backend.records if record.status is Status.EXPECTED_FAILURE]
        wrong += [_of_cause(cause, backend, run) for cause in causes(excused)]
    return wrong


def _of_cause(cause: Cause, backend: BackendSummary, run: RunSummary) -> Issue:
    example = from_here(cause.example)
    further = tuple(record.case for record in cause.failures if record.case != example.case)
    suite = run.environment.get("suite", "")
    return Issue(backend.name, cause.headline, backend.facts.versions, run.environment, suite, example, further)


def markdown_of(issue: Issue) -> str:
    """Title, versions, reproducer, expected and seen, to be pasted."""
    example, machine = issue.example, {name: told for name in _MACHINE if (told := issue.environment.get(name))}
    found = {**issue.versions, **machine, "mla-conformance": f"{__version__}, suite {issue.suite}"}
    lines = [f"# {shown_line(issue.title)}", "", "## Versions", ""]
    lines += [f"- {inline(name)} {inline(version)}" for name, version in found.items()]
    lines += ["", "## Reproducer", "", "```sh", shown_line(example.replay), "```", ""]
    if not example.after:
        place = f"{shlex.quote(example.case)} --backend {shlex.quote(example.reference)}"
        lines += ["As a script that needs torch and the library alone, where one call shows it:", ""]
        lines += ["```sh", shown_line(f"mla-conformance export {place} --out reproducer.py"), "```", ""]
    return "\n".join([*lines, *_numbers(issue)])


def _numbers(issue: Issue) -> Iterator[str]:
    example = issue.example
    clause = f" (SPEC {example.clause})" if example.clause else ""
    demanded = _WITHIN if example.check in ARITHMETIC else definition(example.capability)
    yield from ("## Expected", "", inline(demanded) + clause)
    if expected := _EXPECTED.search(example.message):
        yield from ("", f"Here: {inline(expected[1])}")
    yield from ("", "## Seen", "", inline(example.message))
    yield from (f"<br>{inline(remark)}" for remark in example.remarks)
    yield ""
    if issue.further:
        yield f"{counted(len(issue.further), 'more case')} fail{'' if len(issue.further) > 1 else 's'} in this way:"
        yield from ("", "```sh")
        for case in issue.further[:_MOST_CASES]:
            yield shown_line(replay_line(case, example.reference, salt=example.salt))
        yield "```"
        if len(issue.further) > _MOST_CASES:
            yield f"… and {len(issue.further) - _MOST_CASES} more"
        yield ""
