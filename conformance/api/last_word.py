"""A test run that cannot end as a success before its last word: a parent waits for the process that runs the tests.

Plain functions are called by tests, in pytest's own process, which they may end with a status of 0. Whoever asks xdist
for workers has that already: there a worker that ends is a failure.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from mla_conformance.engine.machine import end_with_parent

NAME: Final = b"mla_conformance"
_PRUNED = {"build", "dist", "node_modules", "venv", "__pycache__", "site-packages"}
_HEEDED = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
ENDED: Final = (
    "mla-conformance: the process that ran the tests ended with exit status 0 before pytest had a result: a kernel "
    "that was called, or what it left behind, ended it; `pytest -v` shows which test was the last"
)


def is_main_program() -> bool:
    """Whether this process is pytest, rather than a program that calls it and goes on afterwards."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # Debian calls it pytest-3
    return Path(sys.argv[0]).name.startswith(("pytest", "py.test")) or getattr(spec, "name", "").startswith("pytest")


def mentions(paths: Iterable[str]) -> bool:
    """Whether a Python file in these folders, or beside these files, names this package, as one does that uses it."""
    for path in (Path(text.partition("::")[0]) for text in paths):
        for file in _below(path) if path.is_dir() else path.parent.glob("*.py"):
            try:
                if NAME in file.read_bytes():
                    return True
            except OSError:
                continue  # pytest says what is wrong with it
    return False


def _below(path: Path) -> Iterator[Path]:
    """The Python files of a folder, through links as pytest finds them, but each folder once."""
    seen = {os.path.realpath(path)}
    for folder, folders, files in os.walk(path, followlinks=True):
        found = {os.path.realpath(Path(folder) / name): name for name in folders}
        folders[:] = [
            name for real, name in found.items() if not (real in seen or name in _PRUNED or name.startswith("."))
        ]
        seen |= found.keys()
        yield from (Path(folder) / name for name in files if name.endswith(".py"))


def give_way() -> Callable[[int], Any] | None:
    """Fork, before threads or a GPU: the child goes on and has what takes its exit status; the parent ends so."""
    told, word = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a caller ignored it, nothing would tell of the child's end
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(word)
        _wait(child, told)
    end_with_parent(parent, signal.SIGKILL)  # as whoever kills pytest means it
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(told)
    return lambda status: os.write(word, bytes([status & 0xFF]))


def _wait(child: int, told: int) -> None:
    """End as the child does, but never as a success that it did not announce."""
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
    try:
        word = os.read(told, 1)
    except BlockingIOError:
        word = b""
    if code == 0 and not word:
        print(ENDED, file=sys.stderr, flush=True)  # noqa: T201 - nobody else is left who could
        os._exit(1)
    os._exit((word[0] if word else 0) or (code if code >= 0 else 128 - code))
