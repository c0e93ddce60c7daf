"""``replay``, ``minimize`` and ``watch``: one case, or a file whenever it changes, in processes that may die of it."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import cache_from_source
from pathlib import Path
from typing import TypeVar

from mla_conformance.backends.foreign import cut
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import simpler
from mla_conformance.commands.console import BROKEN, Progress, clock, live, run_and_report
from mla_conformance.engine import confirm, journal, messages, tasks
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run, passing_run
from mla_conformance.engine.supervisor import POLL_SECONDS, Limits, RunError, Stopped
from mla_conformance.files.whole import InputError, require_writable
from mla_conformance.judging.record import BackendFacts, Record, replay_line
from mla_conformance.judging.traits import Repeated
from mla_conformance.report import json_report, summary
from mla_conformance.report.causes import causes
from mla_conformance.report.outcome import cause_lines, from_here, of_cases, worst_error
from mla_conformance.report.terminal import columns, counted, is_read, say, say_wrapped
from mla_conformance.vocabulary.capabilities import read_case, write_case

_T = TypeVar("_T")
PROBABILITY = 0.95  # with which a race is said to be found


def replay(options: argparse.Namespace) -> int:
    path, salt, confirmed = options.report, options.salt, ""
    after: Sequence[str]
    if (options.case is None) == (path is None):
        raise InputError("replay: expected either a case, as CASE_ID or FILE.json, or --report FILE")
    if path is None:
        if not options.backend:
            raise InputError("replay: expected --backend NAME beside a case")
        case, reference, after = case_id(options.case), options.backend, list(map(case_id, options.after))
    else:
        found = json_report.load_report(path).causes
        failure = chosen_failure(path, found, options.failure, "report", lambda cause: cause.headline).example
        case, confirmed, salt = failure.case, failure.confirmed, failure.salt if salt is None else salt
        reference, after = options.backend or failure.reference, options.after or failure.after
    salt = salt or ""
    if options.repeats:
        with _one_case(case, reference, options, salt) as run:
            return _repeat(run, options.repeats)
    if options.dump is not None:
        from mla_conformance.engine.machine import find_device  # torch is imported before a backend is
        from mla_conformance.export.failing import dump
        from mla_conformance.trials.subject import Subject

        if options.dump.exists() and (not options.dump.is_dir() or any(options.dump.iterdir())):
            raise InputError(f"--dump {options.dump}: expected a new or an empty folder")
    if confirmed:
        say(f"the report says of this failure: it {confirmed}")
    with _one_case(case, reference, options, salt) as run:
        run.before, run.explains = after, not options.no_explain
        status = run_and_report(run, keep_report=False)
    if options.dump is not None:
        device = find_device(options.device or "")
        assert device is not None, "the run was on it"
        sys.path.append(str(Path.cwd()))  # in this process nothing else ran before it
        dump(Subject.of(reference, device), Case.parse(case), options.dump, salt)
        say(f"operands, results, golden results and errors: {options.dump}")
    return status


def _one_case(case: str, backend: str, options: argparse.Namespace, salt: str) -> AbstractContextManager[Run]:
    request = RunRequest.of([backend], device=options.device, cases=[case], salt=salt)
    return passing_run(request, Limits(workers=1, timeout=options.timeout))


def chosen_failure(path: Path, found: Sequence[_T], number: int, what: str, title: Callable[[_T], str]) -> _T:
    if not found:
        raise InputError(f"{path}: expected a {what} with a failure, got none")
    if number > len(found):
        listed = "; ".join(f"{place}. {title(each)}" for place, each in enumerate(found, start=1))
        raise InputError(f"{path}: expected --failure 1 to {len(found)}, got {number}: {listed}")
    return found[number - 1]


def case_id(text: str) -> str:
    return read_case(Path(text)).id if text.endswith(".json") else Case.parse(text).id


def _prepared(run: Run) -> tuple[BackendFacts, Case]:
    run.prepare()
    (facts,), (case,) = run.facts, run.request.cases
    if facts.reasons:
        raise InputError(f"{facts.name} unavailable: {'; '.join(facts.reasons)}")
    return facts, case


def minimize_case(options: argparse.Namespace) -> int:
    if options.out:
        require_writable(options.out)
    with _one_case(case_id(options.case), options.backend, options, options.salt or "") as run, run:
        facts, case = _prepared(run)

        def judged(candidate: Case) -> Record:
            (outcome,) = run.supervisor.run(tasks.Tasks([[messages.Judge(facts.reference, candidate.id)]]))
            assert outcome.answer.record is not None
            return outcome.answer.record

        found, record, tries, complete = confirm.minimize(case, judged, options.tries)
    path = options.out or journal.RUNS / f"minimized-{found.digest}.json"
    try:
        write_case(path, found)
    except OSError as error:
        raise InputError(f"minimize: {error}") from error
    what = f"simplest failing case{'' if complete else ' so far'} ({tries} tried)"
    say(f"{what}: {record.status}: {record.message}", f"case file: {path}", f"replay: {from_here(record).replay}")
    return 0


def _repeat(run: Run, calls: int) -> int:
    def repeated(candidate: Case, times: int) -> Repeated | None:
        (outcome,) = run.supervisor.run(tasks.Tasks([[messages.Repeat(facts.reference, candidate.id, times)]]))
        return outcome.answer.repeated  # None if the process died of it

    with run:
        facts, smallest = _prepared(run)
        found = repeated(smallest, calls)
        # Four times as long at most, step by step; a rare difference may not show in a case that has it.
        ends_at = time.monotonic() + (4 * found.seconds if found and found.breaks else 0)
        candidates = simpler(smallest)
        while found and time.monotonic() < ends_at and (candidate := next(candidates, None)):
            if (again := repeated(candidate, found.calls)) and again.breaks:
                smallest, candidates = candidate, simpler(candidate)
    if found is None or found.failed:
        say_wrapped(f"not repeated: {found.failed}" if found else f"the process died within {calls:,} calls")
        return BROKEN if found else 1
    took = f"{found.calls:,} calls in {found.seconds:.1f} s"
    if not found.differing:
        rare = f"one of {1 / found.rarest(PROBABILITY):,.0f} calls would have shown with {PROBABILITY:.0%}"
        say_wrapped(f"{took}, all with the same bits: what happens in more than {rare}")
    else:
        said = f"{found.differing:,} of {took} have other bits than the first, beginning with call {found.first:,}"
        say_wrapped(f"{said}: {found.what}; {found.wrong or 'within the error budget'}")
        needed = found.calls_for(PROBABILITY)
        seconds = needed * found.seconds / found.calls
        say_wrapped(f"to find one with {PROBABILITY:.0%}: {needed:,} calls, {seconds:.2g} s here")
        if not found.breaks:
            say_wrapped("the kernel does not declare equal bits: information, not a failure")
    if found.breaks:
        path = journal.RUNS / f"race-{smallest.digest}.json"
        try:
            write_case(path, smallest)
        except OSError as error:
            raise InputError(f"--repeats: {error}") from error
        say(
            f"smallest case that differs: {path}",
            f"replay: {replay_line(smallest.id, facts.reference)} --repeats {calls}",
        )
    return int(found.breaks)


def watch(options: argparse.Namespace) -> int:
    request = RunRequest.of([options.backend], options.capability, "smoke", options.device)
    if (file := request.backends[0].file) is None:
        raise InputError(f"watch: expected a class in a file, as file.py:Class, got {options.backend}")

    def has_changed() -> bool:
        return _state(file) not in (seen, ())

    try:
        with passing_run(request, Limits(timeout=options.timeout), explains=not options.no_explain) as run, run:
            seen = _state(file)
            with live(lambda: "starting processes"):
                run.prepare()
            run.begin()
            while True:
                _judge_anew(run, has_changed)
                while not has_changed():
                    time.sleep(POLL_SECONDS)
                    if not is_read():
                        raise RunError("nobody reads the output")
                    if run.supervisor.signal:
                        raise Stopped(run.supervisor.signal)
                seen = _state(file)
                # Bytecode counts as current for a file of the same size and second, which two quick edits have.
                Path(cache_from_source(file)).unlink(missing_ok=True)
                run.begin_anew()
    except Stopped as stop:
        return stop.exit_status


def _state(file: Path) -> tuple[int, ...]:
    """What differs once the file was written; nothing while an editor has it away."""
    try:
        reported = file.stat()
    except OSError:
        return ()
    return reported.st_mtime_ns, reported.st_size, reported.st_ino


def _judge_anew(run: Run, has_changed: Callable[[], bool]) -> None:
    """Say what is wrong, then what that is like; a change of the file ends both."""
    (facts,), (backend,) = run.facts, run.request.backends

    def tell(outcome: summary.BackendOutcome, text: str) -> None:
        say(f"{time.strftime('%H:%M:%S')} {backend.name} {summary.SIGN[outcome]} {text}")

    if facts.reasons:
        tell(summary.BackendOutcome.UNAVAILABLE, cut("; ".join(facts.reasons)))
        return
    progress = Progress(len(run.request.case_ids), parts=0)
    run.on_record, run.supervisor.is_over = progress, has_changed
    try:
        with live(lambda: progress.line):
            failures = run.first_verdicts()
        records = list(run.found.verdicts.values())
        counts = summary.Counts.of(records, len(run.request.case_ids))
        outcome = summary.BackendOutcome.NOT_RUN if counts.not_run else summary.BackendOutcome.PASS
        judged = summary.BackendSummary(facts, summary.summarise(records))
        told = filter(None, [*of_cases(counts), worst_error([judged]), clock(time.monotonic() - progress.began)])
        tell(summary.BackendOutcome.FAIL if counts.failed else outcome, " · ".join(told))
        say(*cause_lines(summary.RunSummary({}, (judged,)), columns()))
        if not (counts.failed and run.explains):
            return
        progress.phase(f"looking what {counted(counts.failed, 'failure')} are like, for up to a minute each kind")
        with live(lambda: progress.line):
            run.settle_failures(failures)
        known = {cause.sentence for cause in causes(records)}
        for cause in causes(list(run.found.verdicts.values())):
            if cause.sentence not in known:
                say_wrapped(f"explained: {cause.cases}: {cause.sentence}", " " * 7)
    except Stopped as stop:
        if stop.signal:
            raise
    finally:
        run.supervisor.is_over = None
