"""``watch``: a backend's file, judged whenever it changes, in processes that have imported torch before."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from math import inf
from pathlib import Path
from typing import NoReturn

from mla_conformance.backends.foreign import cut
from mla_conformance.commands.console import Progress, clock, live
from mla_conformance.engine.confirm import MOST_EXPLAINED, compared, comparisons
from mla_conformance.engine.messages import Judge
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run, passing_run
from mla_conformance.engine.supervisor import Limits, RunError, Stopped
from mla_conformance.engine.tasks import FailureLimit, Tasks, call_of
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.causes import causes
from mla_conformance.report.outcome import cause_lines, of_cases, worst_error
from mla_conformance.report.summary import SIGN, BackendOutcome, BackendSummary, Counts, RunSummary, summarise
from mla_conformance.report.terminal import columns, counted, is_read, say, say_wrapped

_POLL_SECONDS = 0.3  # seconds between two looks at the file


def watch(options: argparse.Namespace) -> int:
    try:
        request = RunRequest.of([options.backend], options.capability, "smoke", options.device)
        file = request.backends[0].file
        if file is None:
            raise InputError(f"watch: expected a class in a file, as file.py:Class, got {options.backend}")
        with passing_run(request, Limits(timeout=options.timeout), explains=not options.no_explain) as run:
            _Watch(run, file).go_on()
    except Stopped as stop:
        return stop.exit_status


@dataclass
class _Watch:
    run: Run
    file: Path
    failed: Sequence[str] = ()
    _seen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        (self._backend,) = self.run.request.backends

    def go_on(self) -> NoReturn:
        with self.run as run:
            self._seen = self._state()
            with live(lambda: "starting processes"):
                run.prepare()
            while True:
                self._judge()
                while not self._has_changed():
                    time.sleep(_POLL_SECONDS)
                    if not is_read():
                        raise RunError("nobody reads the output")
                    if run.supervisor.signal:
                        raise Stopped(run.supervisor.signal)
                self._seen = self._state()
                # Bytecode counts as current for a file of the same size and second, which two quick edits have.
                Path(cache_from_source(self.file)).unlink(missing_ok=True)
                for place in run.supervisor.places:
                    place.renew()
                run.describe()

    def _has_changed(self) -> bool:
        return self._state() not in (self._seen, ())

    def _state(self) -> tuple[int, ...]:
        """What differs once the file was written; nothing while an editor has it away."""
        try:
            reported = self.file.stat()
        except OSError:
            return ()
        return reported.st_mtime_ns, reported.st_size, reported.st_ino

    def _judge(self) -> None:
        (facts,) = self.run.facts
        if facts.reasons:
            self._say(SIGN[BackendOutcome.UNAVAILABLE], cut("; ".join(facts.reasons)))
            return
        cases = list(dict.fromkeys([*self.failed, *self.run.request.case_ids]))
        progress = Progress(len(cases), parts=0)
        with live(lambda: progress.line):
            records = self._records(cases, progress)
        failed = [record for record in records if record.failed]
        left = set(self.failed) - {record.case for record in records}
        self.failed = [*(record.case for record in failed), *sorted(left)]
        if self._has_changed():
            return  # it is judged again at once
        counts, judged = Counts.of(records, len(cases)), BackendSummary(facts, summarise(records))
        outcome = BackendOutcome.NOT_RUN if counts.not_run else BackendOutcome.PASS
        told = filter(None, [*of_cases(counts), worst_error([judged]), clock(time.monotonic() - progress.began)])
        self._say(SIGN[BackendOutcome.FAIL if counts.failed else outcome], " · ".join(told))
        say(*cause_lines(RunSummary({}, (judged,)), columns()))
        if failed and self.run.explains:
            progress.phase(f"looking what {counted(len(failed), 'failure')} are like, for up to a minute each kind")
            with live(lambda: progress.line):
                explained = self._explained(records)
            known = {cause.sentence for cause in causes(records)}
            for cause in () if self._has_changed() else causes(explained):
                if cause.sentence not in known:
                    say_wrapped(f"explained: {cause.cases}: {cause.sentence}", " " * 7)

    def _records(self, cases: Sequence[str], progress: Progress) -> list[Record]:
        tasks = Tasks([[Judge(self._backend.reference, case)] for case in cases])
        patience, records = FailureLimit(self.run.limits.give_up_after), list[Record]()
        for record in self._judged(tasks):
            records.append(record)
            progress(record)
            if patience.exhausted(record):
                tasks.dropped.add((self._backend.reference, call_of(record.case)))
        return records

    def _judged(self, tasks: Tasks) -> Iterator[Record]:
        """What comes of tasks until the file changes, which is looked at whenever a short deadline is over."""
        supervisor = self.run.supervisor
        while not self._has_changed():
            supervisor.ends_at = time.monotonic() + _POLL_SECONDS
            try:
                yield from (outcome.answer.record for outcome in supervisor.run(tasks) if outcome.answer.record)
                return
            except Stopped as stop:
                if stop.signal:
                    raise
            finally:
                supervisor.ends_at = inf

    def _explained(self, records: Sequence[Record]) -> list[Record]:
        found = {record.case: record for record in records}
        examples = [cause.example for cause in causes(records)[:MOST_EXPLAINED]]
        explained = [Judge(self._backend.reference, each.case, explain=True) for each in examples]
        for tasks in (lambda: explained, lambda: comparisons(found.values())):  # these by what the first ones found
            wanted = [task for task in tasks() if found[task.case].status is Status.FAIL]
            for again in self._judged(Tasks([[task] for task in wanted])):
                if again.case in found:
                    found[again.case] = compared(found[again.case], again) or found[again.case]
        return list(found.values())

    def _say(self, sign: str, text: str) -> None:
        say(f"{time.strftime('%H:%M:%S')} {self._backend.name} {sign} {text}")
