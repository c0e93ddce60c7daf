"""Tests made by ``mla.cases``, as pytest runs them: a record of each, and in the end what is wrong with each function.

A function that keeps a plan fails after other cases only: its simplest failure runs once more, alone. No torch.

Functions run in pytest's own process, which they may end with a status of 0. So the run cannot end as a success before
its last word: a parent waits for the process that runs the tests. Whoever asks xdist for workers has that already:
there a worker that ends is a failure.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
import unittest
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from mla_conformance.backends.foreign import one_line
from mla_conformance.diagnosis import UNEXPLAINED
from mla_conformance.engine.machine import end_with_parent
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import CLAUSES, Check, Record, Status
from mla_conformance.report.terminal import columns, counted, shown_line, wrapped

JUDGED: deque[Record] = deque(maxlen=1)  # the record that was made last in this process
PROPERTY, OF_SUITE = "mla_conformance_function", "mla_conformance"  # under which reports have the record of a case
_ALONE = "MLA_CONFORMANCE_ALONE"
_CONFIG: list[pytest.Config] = []  # of the run of pytest, or of the one inside it, if there is one
_SHOWN = 5
_PATIENCE = 60.0  # seconds in which failing cases run again alone
_NAME = b"mla_conformance"
_PRUNED = {"build", "dist", "node_modules", "venv", "__pycache__", "site-packages"}
_HEEDED = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_ENDED = (
    "mla-conformance: the process that ran the tests ended with exit status 0 before pytest had a result: a kernel "
    "that was called, or what it left behind, ended it; `pytest -v` shows which test was the last"
)


def is_alone() -> bool:
    """Whether this process runs a failing case again, of which only the outcome is wanted."""
    return _ALONE in os.environ


def running_test() -> str:
    """The id of the test that pytest runs now; empty outside of pytest."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def say_meanwhile(text: str) -> None:
    """Show a line while a test runs whose output is captured; none where pytest is quiet, or a worker of xdist."""
    plugins = ("terminalreporter", "capturemanager")
    reporter, capture = (_CONFIG[-1].pluginmanager.getplugin(name) if _CONFIG else None for name in plugins)
    if reporter and capture and UNEXPLAINED not in os.environ and reporter.verbosity >= 0:
        with capture.global_and_fixture_disabled():
            for line in wrapped(text, columns(), further=" " * 5):
                reporter.ensure_newline()
                reporter.write_line(shown_line(line))


class OwnTests:
    """A plugin; where workers run the tests, the controller gets the records with their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        _CONFIG.append(config)
        config.add_cleanup(lambda: _CONFIG.remove(config))
        self.of_suite: list[Record] = []  # of the suite's own tests
        self._records: dict[str, dict[str, Record]] = {}
        self._left_out: dict[str, Mapping[str, int]] = {}
        self._interrupted = False

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Remember what cases a function is not asked."""
        for mark in item.iter_markers("parametrize"):
            if len(mark.args) > 1 and (left_out := getattr(mark.args[1], "left_out", None)):
                path, colons, names = self._near(item.nodeid).partition("::")
                self._left_out[f"{path}{colons}{names.partition('[')[0]}"] = left_out

    def _near(self, nodeid: str) -> str:
        """A test's id as it is named where pytest was started, which may be another folder than its own root."""
        path, colons, names = nodeid.partition("::")
        return f"{os.path.relpath(self._config.rootpath / path, self._config.invocation_params.dir)}{colons}{names}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Take the end of the run as a success, which a function has no right to, as a failure of its test."""
        try:
            return (yield)
        except pytest.exit.Exception as ended:
            if ended.returncode == 0 and _case_of(item):
                raise AssertionError(f"the test ended the run as a success: {ended.msg}") from ended
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: "pytest.CallInfo[None]") -> Generator[None, Any, Any]:
        """Attach what became of a case to the report of its test."""
        # pytest.skip is the author's; unittest's exception is no word that a test of a function has for anything.
        raised = call.excinfo if call.excinfo and call.excinfo.errisinstance(unittest.SkipTest) else None
        report = yield
        case = _case_of(item)
        if case and call.when == "call" and (raised or not report.skipped):
            call.excinfo = raised or call.excinfo  # pytest has put its own in the place of it
            record = _record_of(report, call, case)
            if raised:
                report.outcome, report.longrepr = "failed", f"FAIL {record.message}"
            elif call.excinfo and isinstance(call.excinfo.value, InputError):
                report.longrepr = one_line(call.excinfo.value)  # it says what to do, and the way to it nothing
            report.user_properties.append((PROPERTY, json.dumps(msgspec.to_builtins(record))))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the record of a case; workers of xdist send it with their reports."""
        reported = dict(report.user_properties) if report.when == "call" else {}
        if found := reported.get(OF_SUITE):
            self.of_suite.append(msgspec.convert(json.loads(str(found)), Record))
        if found := reported.get(PROPERTY):
            record = msgspec.convert(json.loads(str(found)), Record)
            test = self._near(report.nodeid)
            name = test.replace(record.case, "").replace("[]", "")
            self._records.setdefault(name, {})[test] = record.with_fields(backend=name, reference=test)

    def pytest_keyboard_interrupt(self, excinfo: "pytest.ExceptionInfo[BaseException]") -> None:
        """Wait for nothing more if a person ends the run; what xdist raises for ``-x`` is of another class."""
        self._interrupted = excinfo.type is KeyboardInterrupt

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        """What is wrong with each function, below pytest's own list of failures."""
        yield
        found = {name: list(records.values()) for name, records in self._records.items()}
        failing = {name: records for name, records in found.items() if any(record.failed for record in records)}
        if terminalreporter.verbosity >= 0 and not is_alone():
            for name in (name for name in found if name in self._left_out and name not in failing):
                others = sorted(self._left_out[name].items(), key=lambda item: -item[1])
                shown = ", ".join(f"{value} ({count})" for value, count in others[:_SHOWN])
                more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
                right = f"{name}: right on {counted(len(found[name]), 'case')}"
                text = f"{right}. Left out, unless named in mla.cases: {shown}{more}"
                terminalreporter.write_line("\n".join(wrapped(text, columns(), further="  ")))
        if not failing or is_alone() or hasattr(self._config, "workerinput"):
            return  # a worker of xdist has its own records and nobody who reads it: the controller tells them all
        from mla_conformance.report.causes import Cause, function_lines

        terminalreporter.section("mla-conformance")
        until = time.monotonic() + _PATIENCE
        for name, records in failing.items():
            example = Cause("", tuple(record for record in records if record.failed)).example
            for line in function_lines(name, records, self._passes_alone(example.reference, until - time.monotonic())):
                terminalreporter.write_line(line)

    def _passes_alone(self, test: str, seconds: float) -> bool:
        if seconds <= 0 or self._interrupted or self._config.option.usepdb:
            return False
        option, run = self._config.option, self._config.invocation_params
        # The arguments of this run but for what it collects, and the files that they imply.
        arguments = [str(word) for word in run.args if str(word) not in option.file_or_dir]
        arguments += ["-c", str(self._config.inipath)] if self._config.inipath else []
        try:
            with TemporaryDirectory() as folder:
                # Of plugins that are there, what keeps another run from what this one writes, and from workers.
                apart = {"xmlpath": "--junitxml=", "log_file": f"--log-file={folder}/log"}
                apart |= {"basetemp": f"--basetemp={folder}/base", "numprocesses": "-n0"}
                options = [words for name, words in apart.items() if hasattr(option, name)]
                options += ["-o", f"cache_dir={folder}/cache"]
                rootdir = f"--rootdir={self._config.rootpath}"
                done = subprocess.run(
                    [sys.executable, "-m", "pytest", *arguments, rootdir, test, *options],
                    cwd=run.dir,
                    env={**os.environ, _ALONE: "1", "COVERAGE_FILE": f"{folder}/coverage"},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=seconds,
                )
        except (subprocess.TimeoutExpired, OSError):  # a function may have left no room for files or processes
            return False
        except KeyboardInterrupt:  # a person waits for this, and not for the others either
            self._interrupted = True
            return False
        return done.returncode == pytest.ExitCode.OK and "1 passed" in done.stdout


def _case_of(item: pytest.Item) -> str:
    arguments = getattr(getattr(item, "callspec", None), "params", {})
    return next((value.id for value in arguments.values() if hasattr(value, "suite_case")), "")


def _record_of(report: pytest.TestReport, call: "pytest.CallInfo[None]", case: str) -> Record:
    judged = JUDGED.pop() if JUDGED else None
    passed = Record("", "", case.partition(":")[0], case, Status.PASS)
    if call.excinfo is None:
        return passed
    if judged is not None and judged.case == case and judged.failed:
        return judged
    for trace, *_ in getattr(report.longrepr, "chain", ()):
        for entry in trace.reprentries:
            entry.reprfuncargs = None  # twenty lines of tensors
    report.sections.append(("mla-conformance", f"replay: pytest {shlex.quote(report.nodeid)}"))
    error, clause = call.excinfo.value, CLAUSES[Check.CALL]
    said, detail = f"the test raised {one_line(error)} (SPEC {clause})", "".join(traceback.format_exception(error))
    return passed.with_fields(status=Status.FAIL, check=Check.CALL, clause=clause, message=said, detail=detail)


def is_main_program() -> bool:
    """Whether this process is pytest, rather than a program that calls it and goes on afterwards."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # Debian calls it pytest-3
    return Path(sys.argv[0]).name.startswith(("pytest", "py.test")) or getattr(spec, "name", "").startswith("pytest")


def mentions(paths: Iterable[str]) -> bool:
    """Whether a Python file in these folders, or beside these files, names this package, as one does that uses it."""
    for path in (Path(text.partition("::")[0]) for text in paths):
        for file in _below(path) if path.is_dir() else path.parent.glob("*.py"):
            try:
                if _NAME in file.read_bytes():
                    return True
            except OSError:
                continue  # pytest says what is wrong with it
    return False


def _below(path: Path) -> Iterator[Path]:
    """The Python files of a folder, through links as pytest finds them, but each folder once."""
    seen = {os.path.realpath(path)}
    for folder, folders, files in os.walk(path, followlinks=True):
        found = {os.path.realpath(Path(folder) / name): name for name in folders}
        left = seen | {real for real, name in found.items() if name in _PRUNED or name.startswith(".")}
        folders[:] = [name for real, name in found.items() if real not in left]
        seen |= found.keys()
        yield from (Path(folder) / name for name in files if name.endswith(".py"))


def give_way() -> Callable[[int], Any]:
    """Fork, before threads or a GPU: the child goes on and has what takes its exit status; the parent ends so.

    But never as a success that the child did not announce.
    """
    told, word = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a caller ignored it, nothing would tell of the child's end
    parent, child = os.getpid(), os.fork()
    if not child:
        end_with_parent(parent, signal.SIGKILL)  # as whoever kills pytest means it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(told)
        return lambda status: os.write(word, bytes([status & 0xFF]))
    os.close(word)
    while True:
        found = signal.sigwaitinfo(_HEEDED)
        if found.si_signo != signal.SIGCHLD:
            if found.si_code <= 0:  # sent to this process alone; what a terminal sends, the child has as well
                os.kill(child, found.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    os.set_blocking(told, False)  # what a test started may hold the other end
    announced = b""
    with contextlib.suppress(BlockingIOError):
        announced = os.read(told, 1)
    if code == 0 and not announced:
        print(_ENDED, file=sys.stderr, flush=True)  # noqa: T201 - nobody else is left who could
        os._exit(1)
    os._exit((announced[0] if announced else 0) or (code if code >= 0 else 128 - code))
