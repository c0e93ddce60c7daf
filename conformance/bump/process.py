"""A command that is carried out by a process, and that is told to end when this one is."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from mla_conformance.engine.supervisor import Stopped, heeded


def carry_out(
    command: Sequence[str], environment: Mapping[str, str], capture: bool
) -> "subprocess.CompletedProcess[str]":
    """Carry a command out; what it prints is kept or shown.

    Raises:
        Stopped: by a signal, which the command and whatever is in its process group was sent as well; nothing of that
            is left.
    """
    told, running = list[int](), list[int]()

    def forward(number: int, _: object) -> None:
        told.append(number)
        for group in running:
            _signal(group, number)

    to = subprocess.PIPE if capture else None
    with heeded(forward):
        # In a session of its own, or a terminal's Ctrl-C would reach it twice.
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=to, stderr=to, text=True, env=environment, start_new_session=True
        ) as process:
            running.append(process.pid)
            for number in tuple(told):  # while it was started
                _signal(process.pid, number)
            printed, said = process.communicate()
        if told:
            _signal(process.pid, signal.SIGKILL)
            raise Stopped(told[0])
    return subprocess.CompletedProcess(command, process.returncode, printed, said)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, number)
