"""Threads of the tests that run side by side, a run whose report several tests read, and reports without a run."""

import fcntl
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.cli import main
from mla_conformance.engine import keeper
from mla_conformance.engine.machine import machine_cores
from mla_conformance.judging.record import Record
from mla_conformance.tests.nursery import Nursery
from mla_conformance.tests.reports import write_run

# Kernels' threads that wait for cores which other tests' threads hold make everything many times slower. The variable
# is for the processes that tests start. The process that starts the workers leaves it alone: they would inherit it.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    threads = max(1, machine_cores() // int(workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)


gc.disable()  # nothing of what is imported and collected is garbage
_started_anew = keeper.start_module


def pytest_collection_finish() -> None:
    """To look at it again and again would take a twelfth of the time of all tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[Nursery | None]:
    """Processes of the engine import torch and the suite once for all, where a process can adopt orphans."""
    nursery = Nursery() if sys.platform == "linux" else None
    yield nursery
    if nursery:
        nursery.end()


@pytest.fixture(scope="session")
def command(_nursery: Nursery | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script, or what does the same and imports nothing: for tests that are not of how a process starts."""
    if not _nursery:
        return Path(sys.executable).with_name("mla-conformance")
    folder = tmp_path_factory.mktemp("bin")
    _nursery.write_scripts(folder)
    return folder / "mla-conformance"


@pytest.fixture(scope="session")
def python(command: Path) -> Path:
    """The same of Python, which has imported torch and the suite."""
    return command.with_name("python")


@pytest.fixture
def ours(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Carries out a command; returns its exit status, and what it printed and complained of."""

    def carry_out(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([*map(str, arguments)])
        except SystemExit as ended:  # of the parser
            status = int(ended.code or 0)
        return status, *capsys.readouterr()

    return carry_out


@pytest.fixture
def told(ours: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Carries out a command that has to end with the exit status that comes first; returns all that it says."""

    def saying(status: int, *arguments: object) -> str:
        found, printed, complaints = ours(*arguments)
        assert found == status, complaints
        return printed + complaints

    return saying


@pytest.fixture
def refused(ours: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Carries out a command that has to end as a usage error does; returns the one thing that it says."""

    def refusal(*arguments: object) -> str:
        status, printed, said = ours(*arguments)
        assert (status, printed) == (2, ""), said
        return said

    return refusal


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_report(tmp_path: Path) -> Callable[..., Path]:
    """Writes the report of a run whose records are given, as ``certify`` would; returns its path."""

    def write(name: str, records: Sequence[Record], cases: Sequence[str] = (), **environment: str) -> Path:
        return write_run(tmp_path / name, records, cases, environment=environment)

    return write


@pytest.fixture(scope="session")
def settled() -> Callable[[Path], dict[str, Any]]:
    """Reads a report without what differs from run to run: durations, and which failures a process explained."""

    def read(path: Path) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for backend in data["backends"].values():
            for record in backend["records"]:
                del record["seconds"]
            for capability in backend["capabilities"].values():
                for failure in capability["failures"]:
                    del failure["explanation"]
        return data

    return read


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Fills a folder for all processes of a test run: whoever comes first fills it, the others wait for it."""
    own = tmp_path_factory.getbasetemp()
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def filled(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = base / f"once-{name}", base / f"once-{name}" / "done"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                fill(folder)
                done.touch()
        return folder

    return filled


BROKEN = """
import math
from mla_conformance.backends.eager import EagerPrefillBackend
class Broken(EagerPrefillBackend):
    def kernel_evidence(self):
        return {"kernel": "<b>tile & co</b>"}
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / (math.nan if output.shape[0] == 7 else math.log(2))
"""
KNOWN = """[[expectation]]
backend = "Broken"
case = "lse:call=context_chunk"
check = "lse"
reason = "base 2"
"""
JUDGED = ["--capability=lse", "--capability=new_tokens", "--capability=quant_output_fp8"]
JUDGED += ["--device=cpu", "--tier=smoke", "-n1"]


@pytest.fixture(scope="session")
def real_run(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of a run with failures, an expected one, passes, refusals and an absent backend, in a GitHub job."""

    def fill(folder: Path) -> None:
        (folder / "broken.py").write_text(BROKEN)
        (folder / "known.toml").write_text(KNOWN)
        (folder / "summary.md").write_text("before\n")
        names = ("EAGER", f"{folder}/broken.py:Broken", "FLASH_ATTN", "TORCH_SDPA")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
            backends = [f"--backend={name}" for name in names]
            assert main(["certify", *backends, *JUDGED, f"--expectations={folder}", f"--out={folder / 'out'}"]) == 1

    return once("real-run", fill) / "out"


@pytest.fixture(scope="module")
def keepers_started_anew() -> Iterator[None]:
    """Runs import everything anew: what reaches into other processes finds those of a user's run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "start_module", _started_anew)
        yield
