"""The process that is started before a command is imported: which commands start it, and what becomes of it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from mla_conformance.engine import keeper
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.pool import Limits
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run

TELLS_THREADS = """
import os, torch
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.eager import EagerPrefillBackend


class TellsThreads(EagerPrefillBackend):
    declaration = Declaration(distributions=(f"{torch.get_num_threads()}-{os.environ.get('OMP_NUM_THREADS')}",))
"""


@pytest.mark.parametrize(
    ("line", "starts"),
    [("certify --backend A", 1), ("replay x", 1), ("watch f", 1), ("", 0), ("backends", 0), ("certify --help", 0)],
)
def test_commands_that_judge_start_it(line: str, starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "start_keeper", lambda descriptor, log, environment: "a process")
    monkeypatch.setattr(keeper, "_begun", [])
    keeper.begin(line.split())
    taken = keeper.take()
    assert bool(taken) == bool(starts) and keeper.take() is None
    if taken:
        taken.connection.close()
        for end in taken.log:
            os.close(end)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes have no such files")
def test_it_ends_with_a_command_that_has_no_use_for_it() -> None:
    mark = f"MARK={uuid4()}"
    name, _, value = mark.partition("=")
    command = [sys.executable, "-P", "-m", "mla_conformance", "certify", "--nonsense"]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--nonsense" in done.stderr
    end = time.monotonic() + 20
    while any(mark.encode() in _environment(process) for process in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def test_the_first_worker_of_a_run_comes_from_it_with_the_threads_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("mla_conformance.engine.pool.machine_cores", lambda: 3)
    (tmp_path / "tells.py").write_text(TELLS_THREADS, encoding="utf-8")
    keeper.begin(["certify"])
    process = keeper._begun[0].process
    request = RunRequest.of([f"{tmp_path / 'tells.py'}:TellsThreads"], device="cpu", cases=["lse:q=[1]"])
    with Run(request, RunFolder.claim(tmp_path / "out"), Limits(1)) as run:
        run.prepare()
        assert run.supervisor.places[0].keeper is process
        assert list(run.facts[0].versions) == ["3-3"]
    assert process.poll() is not None
