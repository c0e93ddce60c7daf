"""``watch``: a backend's file, judged whenever it changes, in processes that have imported torch before."""

import argparse
import time
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import NoReturn

from mla_conformance.backends.foreign import cut
from mla_conformance.commands.console import Progress, clock, live
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run, passing_run
from mla_conformance.engine.supervisor import POLL_SECONDS, Limits, RunError, Stopped
from mla_conformance.files.whole import InputError
from mla_conformance.report.causes import causes
from mla_conformance.report.outcome import cause_lines, of_cases, worst_error
from mla_conformance.report.summary import SIGN, BackendOutcome, BackendSummary, Counts, RunSummary, summarise
from mla_conformance.report.terminal import columns, counted, is_read, say, say_wrapped


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
    _seen: tuple[int, ...] = ()

    def go_on(self) -> NoReturn:
        with self.run as run:
            self._seen = self._state()
            with live(lambda: "starting processes"):
                run.prepare()
            run.begin()
            while True:
                self._judge()
                while not self._has_changed():
                    time.sleep(POLL_SECONDS)
                    if not is_read():
                        raise RunError("nobody reads the output")
                    if run.supervisor.signal:
                        raise Stopped(run.supervisor.signal)
                self._seen = self._state()
                # Bytecode counts as current for a file of the same size and second, which two quick edits have.
                Path(cache_from_source(self.file)).unlink(missing_ok=True)
                run.begin_anew()

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
        """Say what is wrong, then what that is like; a change of the file ends both."""
        run, (facts,) = self.run, self.run.facts
        if facts.reasons:
            self._say(SIGN[BackendOutcome.UNAVAILABLE], cut("; ".join(facts.reasons)))
            return
        progress = Progress(len(run.request.case_ids), parts=0)
        run.on_record, run.supervisor.is_over = progress, self._has_changed
        try:
            with live(lambda: progress.line):
                failures = run.first_verdicts()
            records = list(run.found.verdicts.values())
            counts = Counts.of(records, len(run.request.case_ids))
            outcome = BackendOutcome.NOT_RUN if counts.not_run else BackendOutcome.PASS
            judged = BackendSummary(facts, summarise(records))
            told = filter(None, [*of_cases(counts), worst_error([judged]), clock(time.monotonic() - progress.began)])
            self._say(SIGN[BackendOutcome.FAIL if counts.failed else outcome], " · ".join(told))
            say(*cause_lines(RunSummary({}, (judged,)), columns()))
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

    def _say(self, sign: str, text: str) -> None:
        say(f"{time.strftime('%H:%M:%S')} {self.run.request.backends[0].name} {sign} {text}")
