"""Judging one case after the other in a process of its own, which may die or hang on any of them."""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging.verdict import Status, Verdict

_START_SECONDS = 120.0


class Probe:
    """Judges cases on one backend; a verdict of the process's own end is a crash or a timeout."""

    def __init__(self, reference: str, device: torch.device, timeout: float) -> None:
        self._arguments = (reference, device.type)
        self._timeout = timeout
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, case: Case) -> Verdict:
        """The verdict over a case, with its status and check; what lost its GPU or its memory judges no further one."""
        connection = self._connection or self._start()
        try:
            connection.send(case.id)
            if not connection.poll(self._timeout):
                self._stop()
                return Verdict(Status.TIMEOUT, f"no verdict within {self._timeout:g} s")
            verdict, lost = connection.recv()
        except (EOFError, OSError):
            self._stop()
            return Verdict(Status.CRASH, "the process died during this case")
        if lost or verdict.status is Status.UNAVAILABLE:
            self._stop()
        return cast(Verdict, verdict)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, *self._arguments), daemon=True)
        self._process.start()
        remote.close()
        # Imports are not the case's time.
        if not self._connection.poll(_START_SECONDS):
            raise TimeoutError(f"the process of a case did not start within {_START_SECONDS:g} s")
        self._connection.recv()
        return self._connection

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _serve(connection: Connection, reference: str, device: str) -> None:
    """Answer case ids with verdicts until the other end closes."""
    from mla_conformance.driving.subject import Subject
    from mla_conformance.isolation.limits import die_with_parent
    from mla_conformance.problems.memory import device_lost
    from mla_conformance.running.selection import find_device
    from mla_conformance.trials.execute import procedures

    die_with_parent()
    subject = Subject.of(reference, find_device(device))
    procedures()
    _ = subject.roles
    connection.send("ready")
    while True:
        try:
            case = Case.parse(connection.recv())
        except EOFError:
            return
        connection.send((_verdict(subject, case), device_lost(subject.device)))


def _verdict(subject: Any, case: Case) -> Verdict:
    from mla_conformance.driving.driver import one_line
    from mla_conformance.problems.memory import out_of_memory
    from mla_conformance.trials.execute import execute
    from mla_conformance.trials.trial import Trial

    trial = Trial(subject, case)
    try:
        return execute(trial)
    except Exception as error:
        status = Status.UNAVAILABLE if out_of_memory(error) else Status.HARNESS_ERROR
        return trial.verdict if trial.verdict.status is Status.FAIL else Verdict(status, one_line(error))
