"""Processes that a run starts: the one before a command is imported, and those whose backend's import misbehaves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.engine import keeper
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits
from mla_conformance.engine.tasks import call_of
from mla_conformance.judging.verdict import Status
from mla_conformance.report.loading import load_report
from mla_conformance.report.outcome import backend_lines
from mla_conformance.vocabulary.case_files import write_case

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
    monkeypatch.setattr(keeper, "start_module", lambda name, descriptor, **options: "a process")
    monkeypatch.setattr(keeper, "begun", [])
    keeper.begin(line.split())
    assert len(keeper.begun) == starts
    for taken in keeper.begun:
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
    monkeypatch.setattr("mla_conformance.engine.supervisor.machine_cores", lambda: 3)
    (tmp_path / "tells.py").write_text(TELLS_THREADS, encoding="utf-8")
    keeper.begin(["certify"])
    process = keeper.begun[0].process
    request = RunRequest.of([f"{tmp_path / 'tells.py'}:TellsThreads"], device="cpu", cases=["lse:q=[1]"])
    with Run(request, RunFolder.claim(tmp_path / "out"), Limits(1)) as run:
        run.prepare()
        assert run.supervisor.places[0].keeper is process
        assert list(run.facts[0].versions) == ["3-3"]
    assert process.poll() is not None


CASES = [f"lse:dims=small;heads=2;q=[{tokens}]" for tokens in (3, 4, 5, 6)]
CASES += ["lse:call=context_chunk;dims=small;heads=2;q=[3];kv=[5]"]
DIED = "its process ended while it was imported and described: "
UNAVAILABLE = {
    "Segfaults": ("import ctypes; ctypes.string_at(0)", DIED + "Segmentation fault"),
    "Exits": ("import sys; sys.exit(0)", "does not import: SystemExit: 0"),
    "ExitsAtOnce": ("import os; os._exit(0)", DIED + "exit status 0"),
    "Hangs": ("import time; time.sleep(1000)", DIED + "no answer within 2 s"),
    "Raises": ("import no_such_library", "does not import: ModuleNotFoundError: No module named 'no_such_library'"),
}
AVAILABLE = {
    "Prints": "import os; print('{'); os.write(1, b'['); os.write(2, b'[')",
    "Forks": "import os; os.fork()",
    "Replaces": "import builtins, torch; exp = torch.exp; torch.Tensor.exp = lambda tensor: 2 * exp(tensor); "
    "builtins.len = lambda _: 0",
}
HANGS_WHEN_MADE = """
import time
from mla_conformance.backends.eager import EagerPrefillBackend

class HangsWhenMade(EagerPrefillBackend):
    def __init__(self, *arguments, **options):
        time.sleep(1000)
"""


def reference(folder: Path, name: str, statement: str) -> str:
    """A backend that does as EAGER does once it is imported."""
    source = folder / f"{name.lower()}.py"
    eager = "from mla_conformance.backends.eager import EagerPrefillBackend"
    source.write_text(f"{eager}\n{statement}\nclass {name}(EagerPrefillBackend): ...\n")
    return f"--backend={source}:{name}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, command: Path) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """The folder of one run over all of them and EAGER, and what it printed."""
    folder = tmp_path_factory.mktemp("imports")
    statements = {name: statement for name, (statement, _) in UNAVAILABLE.items()} | AVAILABLE
    backends = [reference(folder, name, statement) for name, statement in statements.items()]
    (folder / "made.py").write_text(HANGS_WHEN_MADE)
    backends += [f"--backend={folder / 'made.py'}:HangsWhenMade", "--backend=EAGER"]
    for number, case in enumerate(CASES):
        write_case(folder / "cases" / f"{number}.json", Case.parse(case))
    options = [f"--cases={folder / 'cases'}", "--device=cpu", "--timeout=2s", "--give-up-after=1", "--workers=2"]
    call = [str(command), "certify", *backends, *options, "--json", f"--out={folder / 'out'}"]
    return folder / "out", subprocess.run(call, capture_output=True, text=True, check=False)


def test_a_backend_that_misbehaves_costs_its_own_verdicts_only(run: tuple[Path, Any]) -> None:
    """What an import replaced is put back, for all of them."""
    backends = {backend.name: backend for backend in load_report(run[0]).backends}
    for name, (_, said) in UNAVAILABLE.items():
        (reason,) = backends[name].reasons
        assert said in reason, name
    for name in ("EAGER", *AVAILABLE):
        assert [record.status for record in backends[name].records] == [Status.PASS] * len(CASES), name
    folder, done = run  # standard output is exactly one document, whatever backends print
    assert json.loads(done.stdout) == json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert done.returncode == 1 and done.stderr == ""


def test_after_equal_timeouts_the_rest_is_not_run_with_the_reason(run: tuple[Path, Any]) -> None:
    (hangs,) = (backend for backend in load_report(run[0]).backends if backend.name == "HangsWhenMade")
    timeouts = [record.status for record in hangs.records]
    calls = {call_of(record.case) for record in hangs.records}
    assert set(timeouts) == {Status.TIMEOUT} and len(timeouts) <= 2 * len(calls)  # two workers may be at each
    assert hangs.counts.not_run == len(CASES) - len(timeouts)
    said = "after 1 equal failures of its process: no verdict within the time"
    lines = "\n".join(backend_lines(hangs, 1000))
    assert f"{hangs.counts.not_run} NOT RUN: gave up on " in lines
    assert all(f"gave up on {call} {said}" in lines for call in calls)
