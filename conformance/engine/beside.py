"""Judging case by case for a program that a kernel must not end, such as pytest: by a run in a process beside it."""

import contextlib
import signal
import socket
import sys
from functools import cached_property

import msgspec

from mla_conformance.backends.references import BackendReferenceError
from mla_conformance.cases.case import CaseError
from mla_conformance.engine import keeper, machine, tasks
from mla_conformance.engine.messages import Judge, decode, read_line, tell
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import passing_run
from mla_conformance.engine.supervisor import RunError, Stopped
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import Record


class Answer(msgspec.Struct, frozen=True):
    reasons: dict[str, tuple[str, ...]] = {}
    record: Record | None = None
    error: str = ""


class Judging:
    def __init__(self, backends: tuple[str, ...], device: str) -> None:
        self._process, self._connection = keeper.start_module(__name__)
        with contextlib.suppress(OSError):  # that it has ended is seen when it does not answer
            tell(self._connection, (backends, device))

    @cached_property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        return self._answer().reasons

    def judge(self, reference: str, case: str) -> Record:
        with contextlib.suppress(OSError):
            tell(self._connection, (reference, case))
        record = self._answer().record
        assert record is not None
        return record

    def _answer(self) -> Answer:
        line = b""
        with contextlib.suppress(OSError):
            line = read_line(self._connection)
        if not line:
            raise RunError(f"the process that judges ended with status {self._process.wait()}; start pytest anew")
        answer = decode(line, Answer)
        if answer.error:
            raise RunError(answer.error)
        return answer

    def end(self) -> None:
        self._connection.close()
        self._process.terminate()
        keeper.end_of_process(self._process, 10.0)


def main(connection: socket.socket) -> None:
    backends, device = decode(read_line(connection), tuple[tuple[str, ...], str])
    try:
        # No other case is listed, which takes two seconds.
        with passing_run(RunRequest.of(backends, device=device or None, cases=["lse:q=[4]"])) as run, run:
            run.prepare()
            tell(connection, Answer({facts.reference: facts.reasons for facts in run.facts}))
            while line := read_line(connection):
                reference, case = decode(line, tuple[str, str])
                for outcome in run.outcomes(tasks.Tasks([[Judge(reference, case)]]), machine.WHOLE):
                    tell(connection, Answer(record=outcome.answer.record))
    except (InputError, BackendReferenceError, CaseError, RunError) as error:
        tell(connection, Answer(error=str(error)))
    except Stopped:
        return


if __name__ == "__main__":
    machine.end_with_parent(int(sys.argv[2]), signal.SIGTERM)
    main(socket.socket(fileno=int(sys.argv[1])))
