"""Failures of functions compared with known ones in a process beside: comparing may end it, which ends no test run.

What the function does on cases nearby is asked back in the process of the test.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory, TemporaryFile

import msgspec
import torch

from mla_conformance.backends.foreign import cut, one_line
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis import UNEXPLAINED, reach
from mla_conformance.diagnosis.explain import PATIENCE, WHOLE, Failure, ReportedCauses, explain
from mla_conformance.engine import keeper, machine, place
from mla_conformance.engine.messages import decode, read_line, tell
from mla_conformance.judging.record import ENDED, UNASKED, Record
from mla_conformance.judging.steps import Measured
from mla_conformance.report.causes import symptom
from mla_conformance.trials.trial import Context

_MOST_ENDED = 3  # processes that may end over comparing before nothing is compared: each takes seconds to start
Function = tuple[str, str]  # a test function, and the name of what is judged


@dataclass
class Explained:
    """What was found of the failures of one function, and of which kinds the first one was compared with everything."""

    reported: ReportedCauses = field(default_factory=lambda: ReportedCauses([]))
    kinds: set[str] = field(default_factory=set)

    def explain(self, failure: Failure) -> str:
        if said := self.reported.explain(failure):
            return said
        if (kind := symptom(failure.record)) in self.kinds:
            return UNASKED
        said = explain(failure, PATIENCE if self.kinds else WHOLE)
        self.kinds.add(kind)
        if failure.record.with_fields(explanation=said).is_explained:
            self.reported.texts.append(said)
        return said


class _Said(msgspec.Struct, frozen=True):
    explanation: str = ""
    nearby: str = ""
    in_numbers: bool = False  # whether the numbers there are wanted as well


class Explainer:
    def __init__(self) -> None:
        self._owner, self._ended, self._alone = 0, list[str](), threading.RLock()

    def explain(self, function: Function, failure: Failure) -> str:
        """What a failure looks like, or what kept it from being compared, such as the end of the process."""
        if UNEXPLAINED in os.environ:
            return ""
        with self._alone:
            if len(self._ended) >= _MOST_ENDED:
                return f"{ENDED}{self._ended[-1]} {_MOST_ENDED} times in this process, and is tried no more"
            until = time.monotonic() + place.EXPLAIN_SECONDS
            try:
                return self._explained(function, failure, until)
            except (EOFError, ConnectionError, TimeoutError, json.JSONDecodeError, msgspec.MsgspecError):
                is_late, how = time.monotonic() >= until, self._end()
                how = f"its time limit, {place.EXPLAIN_SECONDS:g} s" if is_late else how
            except (OSError, RuntimeError) as error:  # no room for the numbers, or no further process or file
                self._end()
                how = one_line(error)
            except BaseException:  # of the test run, such as Ctrl-C: what is said later answers nothing
                self._end()
                raise
            self._ended.append(how)
            return f"{ENDED}{how}"

    def _explained(self, function: Function, failure: Failure, until: float) -> str:
        if self._owner != os.getpid():  # a test that forked has its own
            self._owner, self._log = 0, TemporaryFile()  # noqa: SIM115 - read when the process has ended
            started = keeper.start_module(__name__, stdout=subprocess.DEVNULL, stderr=self._log)
            (self._process, self._connection), self._owner = started, os.getpid()
        with TemporaryDirectory(prefix="mla-conformance-explained-") as folder:

            def written(about: Failure | None) -> str | None:
                if about is None:
                    return None
                numbers = [(each.got, each.golden, each.allowed) for each in about.observed.numbers]
                known = function, msgspec.to_builtins(about.record), str(about.device), about.context.salt
                torch.save((*known, about.observed.failure, numbers), path := f"{folder}/failure.pt")
                return path

            tell(self._connection, written(failure))
            while True:
                if not select.select([self._connection], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise TimeoutError
                if not (line := read_line(self._connection)):
                    raise EOFError
                said = decode(line, _Said)
                if not said.nearby:
                    return said.explanation
                case = Case.parse(said.nearby)
                tell(self._connection, written(failure.again(case)) if said.in_numbers else failure.nearby(case))

    def _end(self) -> str:
        if self._owner != os.getpid():
            return ""
        self._owner = 0
        self._connection.close()
        status = keeper.end_of_process(self._process, 2.0)
        with self._log:
            self._log.seek(0)
            said = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return machine.cause_of(status) + (f": {cut(said[-1])}" if status > 0 and said else "")


EXPLAINER = Explainer()


def main(connection: socket.socket) -> None:
    found: defaultdict[Function, Explained] = defaultdict(Explained)
    contexts: dict[str, Context] = {}

    def nearby(case: Case, in_numbers: bool = False) -> str | None:
        tell(connection, _Said(nearby=case.id, in_numbers=in_numbers))
        return decode(read_line(connection), str | None)

    def again(case: Case) -> Failure | None:
        path = nearby(case, in_numbers=True)
        return read(path)[1] if path else None

    def read(path: str) -> tuple[Explained, Failure]:
        function, record, device, salt, failed, numbers = torch.load(path, weights_only=True)
        observed = reach.Behaviour(failed, tuple(Measured(*each) for each in numbers))
        context = contexts.setdefault(salt, Context(salt))
        known = msgspec.convert(record, Record), observed, torch.device(device), context
        return found[function], Failure(*known, nearby, again)

    while line := read_line(connection):
        explained, failure = read(decode(line, str))
        tell(connection, _Said(explained.explain(failure)))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
