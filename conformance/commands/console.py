"""What a person sees of a run: header, progress, what is wrong with each backend, its outcome, closing line."""

import hashlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from mla_conformance.backends.foreign import cut
from mla_conformance.backends.references import LEFT_OUT, known_backends
from mla_conformance.engine.journal import PAGE_NAME, REPORT_NAME, Reported
from mla_conformance.engine.request import Plan
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import RunError, Stopped
from mla_conformance.files.whole import InputError, write_whole
from mla_conformance.judging.record import Record, Status
from mla_conformance.report import ci_views, json_report, outcome
from mla_conformance.report.html import html
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import columns, counted, near, put, say, shown, side_by_side, wrapped
from mla_conformance.vocabulary.arrays import SPACES

BROKEN = 3
_SOME = 10  # one in so many records has to be there before their pace says what is left: the first load and warm up


def run_and_report(
    run: Run,
    as_json: bool = False,  # print the report instead of text
    keep_report: bool = True,  # whether the run's folder outlives the command, so that it is worth naming
    resumed: Plan | None = None,  # that of the run that is gone on with, which must be this one
    check: Callable[[Run], None] | None = None,  # refuses a prepared run that is not to be carried out at all
    detail: outcome.Detail = outcome.Detail.FULL,  # how much is said of what is not wrong
) -> int:
    is_quiet = as_json or detail is outcome.Detail.QUIET
    with run:
        if status := _prepare(run, resumed, check):
            return status
        if not is_quiet:
            _say_wrapped(*_header(run))
        broken = unwritten = ""
        try:
            if is_quiet:  # a machine reads the report
                run.judge()
            else:
                earlier, asked = run.found.verdicts.values(), run.request
                expected = {facts.name: len(asked.judged_of(facts)) + any(asked.explore) for facts in run.available}
                progress = Progress(sum(expected.values()), len(earlier), sum(record.failed for record in earlier))
                if len(expected) > 1:
                    progress.left = Counter(expected) - Counter(record.backend for record in earlier)
                run.on_record, run.on_phase = progress, progress.phase
                with live(lambda: progress.line) as progress.tell:
                    run.judge()
        except RunError as error:
            broken = str(error)
        except Stopped as stop:
            status = stop.exit_status
            broken = f"ended by {stop}" + (f"; to continue: {run.resume_line}" if keep_report else "")
        try:
            run.finish()
        except RunError as error:
            say(f"mla-conformance: {error}", error=True)
            return status or BROKEN
        report = run.folder.path / REPORT_NAME
        summary = replace(run.summary(), source=str(near(report)) if keep_report else "")
        text = json_report.to_text(json_report.report_form(summary))
        digest = hashlib.sha256(text.encode()).hexdigest()
        try:  # while the folder is this run's alone
            write_whole(report, text)
            run.folder.journal.append(Reported(digest))  # after which nothing of the run goes on
            if keep_report:
                write_whole(report.with_name(PAGE_NAME), html(summary))
        except OSError as error:
            digest, why = "none", f"cannot write {error.filename or report}: {error.strerror}"
            unwritten = f"{why}; the journal beside it holds the verdicts"
    _say_outcome(run, summary, as_json, detail, digest if keep_report else "")
    say(*(f"mla-conformance: {message}" for message in (broken, unwritten) if message), error=True)
    return status or summary.exit_status or (BROKEN if broken or unwritten else 0)


def _say_outcome(run: Run, summary: RunSummary, as_json: bool, detail: outcome.Detail, digest: str) -> None:
    """Of a report that is kept, which alone has a digest, also where it is, and a step's summary."""
    is_quiet = as_json or detail is outcome.Detail.QUIET
    if digest and (path := os.environ.get("GITHUB_STEP_SUMMARY")):
        try:
            # Nobody may read a FIFO.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            with open(descriptor, "a", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
                file.write(ci_views.markdown(summary))
        except OSError as error:
            say(f"mla-conformance: GITHUB_STEP_SUMMARY {path}: cannot be written: {error.strerror}", error=True)
    if as_json:
        put(json.dumps(msgspec.to_builtins(json_report.report_form(summary)), indent=1))
    else:
        say(*outcome.outcome_lines(summary, columns(), run.request.is_usual, detail))
    if not is_quiet:
        _say_wrapped(outcome.closing_line(summary))
        if left_out := set(known_backends()) - set(run.request.backends) if run.request.is_usual else ():
            names = sorted(backend.name for backend in left_out)
            _say_wrapped("not judged: " + "; ".join(f"{name}, which {LEFT_OUT[name]}" for name in names))
            _say_wrapped(f"to judge {'them' if names[1:] else 'it'}: --all, or --backend {names[0]}")
        if run.request.deployment and not summary.environment.get("compute_capability"):
            say("judged on a CPU; verdicts on GPUs: mla-conformance scoreboard --out site")
    if digest and not as_json and (not is_quiet or summary.exit_status):
        say(f"report {near(run.folder.path / PAGE_NAME)}, and {REPORT_NAME} beside it, SHA-256 {digest}")
    if not digest and (printed := run.supervisor.log.tail):  # whose file goes with the run's folder
        say("what the kernel printed last:", *(f"  {line}" for line in printed.split("\n")), error=True)


def _header(run: Run) -> Iterator[str]:
    asked, environment = run.request, run.environment
    fitted = sum(len(facts.fitted) for facts in run.available)
    drawn = f"{asked.explore} drawn for each role" if any(asked.explore) else ""
    drawn = f"cases drawn for {asked.explore}" if asked.explore.seconds else drawn
    cases = [counted(len(asked.judged_ids), "case"), f"{fitted} fitted" if fitted else "", drawn]
    salted = f"salt {environment['salt']}" if "salt" in environment else ""
    where = [f"{name} {environment[name]}" for name in ("device", "torch", "suite")]
    shard = f"shard {asked.shard} of {len(asked.case_ids)}" if asked.shard else ""
    scope = str(asked.deployment or "") if asked.deployment or asked.cases else f"tier {asked.tier.value}"
    what = [scope, " and ".join(filter(None, cases)), salted, "golden float64", shard]
    yield " · ".join(filter(None, [*where, *what]))
    if "role" in environment:
        yield f"a role from outside, which is judged and never certified: {environment['role']}"
    for case in () if asked.deployment else asked.cases:
        space = next(space for space in SPACES.values() if space.role is case.role)
        if names := space.outside(case):
            yield f"outside the {space.role} space in {', '.join(names)}, judged as given: {case.id}"


def _prepare(run: Run, resumed: Plan | None, check: Callable[[Run], None] | None) -> int:
    """The exit status of a run that cannot begin, of which it is said why; else 0."""
    began = time.monotonic()
    try:
        with live(lambda: f"starting processes, describing backends · {clock(time.monotonic() - began)}"):
            run.prepare()
        if check:
            check(run)
        if left_out := run.begin(resumed):
            lines = f"{counted(len(left_out), 'line')} that the run did not seal: {cut(', '.join(map(str, left_out)))}"
            say(f"mla-conformance: left out of its journal: {lines}; what they are about is judged anew", error=True)
        if resumed and (said := run.environment.get("journal")):
            say(f"mla-conformance: its journal is {said}; what was judged before is taken on trust", error=True)
    except (InputError, Stopped, RunError, OSError) as error:
        run.folder.discard()
        if isinstance(error, InputError):
            raise
        is_stopped = isinstance(error, Stopped)
        say(f"mla-conformance: {f'ended by {error} before anything was judged' if is_stopped else error}", error=True)
        return BROKEN if not isinstance(error, Stopped) else error.exit_status or BROKEN
    return 0


def _say_wrapped(*texts: str) -> None:
    for text in texts:
        say(*side_by_side(text.split(" · "), " · ", columns()))


@dataclass
class Progress:
    """Counts what is judged, in ``parts`` lines where none is live; failures are told by their causes, at the end."""

    total: int
    done: int = 0
    failed: int = 0
    parts: int = 10
    left: Counter[str] = field(default_factory=Counter)  # of each of several backends, told of when nothing is
    tell: Callable[[str], None] = say  # while no line is live
    began: float = field(default_factory=lambda: time.monotonic())
    _since: float = 0.0  # when the pace of the moment began, and how many were judged at it
    _at_pace: int = 0
    _phase: str = ""
    _now: str = ""
    _failure: str = ""
    _found: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def __call__(self, record: Record) -> None:
        if record.confirmation or record.is_explained:
            return  # it was counted when it was judged first
        self.done += 1
        self._at_pace += record.status is not Status.UNSUPPORTED or record.seconds > 0  # else no process was asked
        self.failed += record.failed
        self._failure = self._failure or (f"{record.backend} {record.case}: {record.message}" if record.failed else "")
        self._now = f"{record.backend} {record.capability}"
        found = self._found[record.backend]
        word = "passed" if record.status is Status.PASS else "failed" if record.failed else record.status
        found[word.replace("_", " ")] += 1
        self.left[record.backend] -= 1
        if self.left[record.backend] == 0:
            counts = ", ".join(f"{number:,} {name}" for name, number in found.most_common())
            self.tell(f"{record.backend}: {counts} · {clock(time.monotonic() - self.began)}")
        before, now = ((done * self.parts) // max(1, self.total) for done in (self.done - 1, self.done))
        if self.tell is say and now > before:
            say(f"… {self.line}")

    def phase(self, what: str) -> None:
        self._phase, self._now = what, ""
        self._at_pace, self._since = 0, time.monotonic()
        if self.parts and self.tell is say:
            say(*f"… {self.line}".splitlines())
            self._failure = ""

    @property
    def line(self) -> str:
        told = [f"{self.done}/{self.total} judged", f"{self.failed} failed", clock(time.monotonic() - self.began)]
        seconds, judged, left = time.monotonic() - (self._since or self.began), self._at_pace, self.total - self.done
        if _SOME * judged >= left + judged and left > 0:
            told.append(f"about {clock(seconds * left / judged)} left")
        failure = wrapped(cut(self._failure), columns(), "  ", "  ") if self._phase and self.parts else []
        return "\n".join([" · ".join(filter(None, (*told, self._phase, self._now))), *failure])


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


@contextmanager
def live(line: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Show a line, gone at the end, on a terminal that can draw it anew, outside CI; it gives what writes others."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown") or "CI" in os.environ:
        yield say
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text("\n".join(map(shown, line().splitlines())), style="dim", no_wrap=True, overflow="ellipsis")

    console = Console(file=sys.stdout, highlight=False)
    with Live(console=console, get_renderable=drawn, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield lambda text: console.print(Text(shown(text)))
