"""Every way to misbehave is the verdict of its own case only; a worker goes on while it has its GPU and its memory."""

import ctypes
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.foreign import LINE, MESSAGE
from mla_conformance.cases.case import Case
from mla_conformance.commands.console import run_and_report
from mla_conformance.driving import driver
from mla_conformance.driving.driver import IN_PROCESS
from mla_conformance.engine import machine
from mla_conformance.engine import worker as room
from mla_conformance.engine.journal import JOURNAL_NAME, LOG_NAME, RunFolder
from mla_conformance.engine.messages import Judge
from mla_conformance.engine.place import KEPT_BYTES
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits
from mla_conformance.engine.worker import Worker
from mla_conformance.judging.golden import memory_need
from mla_conformance.judging.record import Check, Record, Status
from mla_conformance.report.json_report import load_report
from mla_conformance.tests.faults import HANGS
from mla_conformance.tests.reports import unexplained

FAULTY, HANGING = CASES = ("no_side_effects:q=[7,4];out=1", "no_side_effects:q=[2]")
PASS = (Status.PASS, "", "")
FORBIDS_SIGNALS = ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6
"""Whether the system can, by the version of its Landlock; Linux from 6.12 on."""
_DIED = "the process died during this case: "
OF_PROCESSES: dict[str, tuple[Status, str, str]] = {
    **dict.fromkeys(("Killed", "KillsItsGroup", "KillsItsParent"), (Status.CRASH, "", f"{_DIED}Killed")),
    **dict.fromkeys(("InterruptsItself", "LeavesAChildAndAborts"), (Status.CRASH, "", _DIED)),
    "Segfault": (Status.CRASH, "", f"{_DIED}Segmentation fault"),
    "ExitsAtOnce": (Status.CRASH, "", f"{_DIED}exit status 0"),
    **dict.fromkeys(HANGS, (Status.TIMEOUT, "", "no verdict within the time")),
    "Shouts": (Status.FAIL, Check.CALL, "… and 29,997,952 more "),
    "SaysWhatEndsNever": (Status.FAIL, Check.CALL, "malformed reply from the kernel process: expected at most"),
    "TellsTooMuch": PASS,
    "ClosesStdout": (Status.FAIL, Check.PROCESS_STATE, "a standard stream"),
    "ForbidsFiles": (Status.FAIL, Check.PROCESS_STATE, "resource limit RLIMIT_FSIZE"),
    "EAGER": PASS,
    "Leaks": (Status.UNAVAILABLE, "", "you tried to allocate 67108864 bytes"),
    "Compiles": (Status.UNAVAILABLE, "", "unjudged: it was still compiling when the time"),
    "Floods": PASS,  # to print is no fault of a kernel; only the log must not grow with it
    "Forks": PASS,  # the child is ended where it comes back
    "Signals": (Status.FAIL, Check.CALL, "PermissionError") if FORBIDS_SIGNALS else PASS,
    "ReturnsItsBuffer": (Status.FAIL, Check.STALE_RESULT, "overwrote the result of an earlier one"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    source = shutil.copy(Path(__file__).with_name("faults.py"), folder)
    backends = [name if name == "EAGER" else f"{source}:{name}" for name in OF_PROCESSES]
    request = RunRequest.of(backends, device="cpu", cases=CASES)
    run = Run(request, RunFolder.claim(folder / "out"), Limits(4, 2.0, 4 * 2**30))  # most of it waits
    with unexplained():
        assert run_and_report(run, as_json=True) == 1
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[tuple[str, str], Record]:
    report = load_report(folder / "out")
    assert report.environment["judge"] == "kernel and judge apart"
    by_case = {(record.backend, record.case): record for record in report.records}
    assert len(by_case) == len(report.records)
    return by_case


def test_each_fault_of_a_process_is_the_verdict_of_its_own_case_only(records: dict[tuple[str, str], Record]) -> None:
    expected = {(name, case): PASS for name in OF_PROCESSES for case in CASES}
    expected |= {(name, HANGING if name in HANGS else FAULTY): outcome for name, outcome in OF_PROCESSES.items()}
    found = {key: (record.status, record.check) for key, record in records.items()}
    assert found == {key: outcome[:2] for key, outcome in expected.items()}
    assert {key: said for key, (*_, said) in expected.items() if said not in records[key].message} == {}
    assert {record.confirmation for record in records.values() if record.failed} == {"alone"}
    for name in HANGS:
        assert "faults.py" in records[name, HANGING].detail and "in before" in records[name, HANGING].detail, name


def test_nothing_is_left_but_bounded_files(folder: Path, records: dict[tuple[str, str], Record]) -> None:
    children = (folder / "children").read_text().split()
    assert len(children) == 4  # two, each confirmed
    assert not [child for child in children if Path("/proc", child).exists()]
    names = {path.name for path in (folder / "out").iterdir() if not path.is_fifo()}
    assert names == {JOURNAL_NAME, LOG_NAME, "report.json", "report.html"}
    assert (folder / "out" / LOG_NAME).stat().st_size <= KEPT_BYTES
    assert (folder / "out" / JOURNAL_NAME).stat().st_size < 2**20
    shouted, told = records["Shouts", FAULTY], records["TellsTooMuch", FAULTY]
    assert len(shouted.message) <= MESSAGE and len(shouted.detail) < LINE + 99
    assert sum(map(len, told.evidence)) < 2 * MESSAGE


STARVED = """
import os, pathlib
from mla_conformance.backends.eager import EagerPrefillBackend as E
class Starved(E):
    def run_prefill_new_tokens(self, *arguments, **options):
        pathlib.Path(__file__).with_name("vmstat").write_text("oom_kill 9\\n")
        os.kill(os.getpid(), 9)
"""


def test_what_the_system_ends_for_want_of_memory_is_not_wrong(tmp_path: Path, monkeypatch: Any, told: Any) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 8\n")
    monkeypatch.setattr(machine, "_VMSTAT", tmp_path / "vmstat")
    (tmp_path / "starved.py").write_text(STARVED)
    said = told(3, "replay", SMALL, f"--backend={tmp_path}/starved.py:Starved", "--device=cpu")
    assert "while the system ended a process for want of memory" in " ".join(said.split())


GPU_CASES = ["no_side_effects:q=[5,3]", "no_side_effects:q=[7,4];out=1", "no_side_effects:q=[2]"]
OF_A_GPU: dict[str, tuple[Status, str, str]] = {
    "IllegalAddress": (Status.FAIL, Check.CALL, "illegal memory access"),
    "Misaligned": (Status.FAIL, Check.CALL, "misaligned address"),
    "DeviceAssert": (Status.FAIL, Check.CALL, "device-side assert"),
    "FailsAfterItReturned": (Status.FAIL, Check.CALL, "launch failure"),
    "NeverLaunches": (Status.FAIL, Check.MASK, "NaN"),
}


@pytest.mark.skipif(
    not (torch.cuda.is_available() and hasattr(torch.cuda, "_compile_kernel")),
    reason="needs a CUDA device and torch 2.9, which compiles kernels",
)
def test_a_run_on_a_gpu_has_exactly_the_expected_verdicts(tmp_path: Path) -> None:
    source = shutil.copy(Path(__file__).with_name("faults.py"), tmp_path)
    request = RunRequest.of([f"{source}:{name}" for name in OF_A_GPU], device="cuda", cases=GPU_CASES)
    run = Run(request, RunFolder.claim(tmp_path / "out"), Limits(workers=1, timeout=300))
    assert run_and_report(run, as_json=True) == 1
    records = {(record.backend, record.case): record for record in run.summary().records}
    assert len(records) == len(run.summary().records)
    expected = {(name, case): (Status.PASS, "") for name in OF_A_GPU for case in GPU_CASES}
    expected |= {(name, GPU_CASES[1]): (status, check) for name, (status, check, _) in OF_A_GPU.items()}
    found = {key: (record.status, record.check) for key, record in records.items()}
    assert found == expected, {key: record.message for key, record in records.items()}
    assert all(said in records[name, GPU_CASES[1]].message for name, (_, _, said) in OF_A_GPU.items())


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
SMALL = "lse:dims=small;heads=2;q=[5,9]"


class Wrong(EagerPrefillBackend):
    def _finish(self, state: Any) -> Any:
        output, lse = super()._finish(state)
        return output, lse + 1


class ChangesDtype(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().run_prefill_new_tokens(*arguments, **options)


class LosesTheGPU(EagerPrefillBackend):
    run_prefill_new_tokens = Mock(side_effect=RuntimeError("CUDA error: misaligned address"))


def asked(kernel: str, case: str = SMALL, limit: int | None = None, **task: Any) -> list[Any]:
    said: list[Any] = []
    reference = kernel if kernel == "EAGER" else f"{__name__}:{kernel}"
    answer = Worker(CPU, limit, said.append, IN_PROCESS).answer(Judge(reference, case, **task))
    return [*said, answer]


def test_a_case_waits_for_what_it_needs_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes its part."""
    worker, free = Worker(CPU, None, lambda event: None, IN_PROCESS), [2**40]
    for name in ("set_per_process_memory_fraction", "memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(room, "free_memory", lambda device: free[0])
    monkeypatch.setattr(room, "whole_memory", lambda device: 2**42)
    task, need = Judge("EAGER", SMALL), memory_need(Case.parse(SMALL), "cpu")
    wanted = worker.answer(task, need).wants
    assert wanted == need + 2 * GIB, "inputs and golden results are kept for cases to come"
    for share, left, wants in ((wanted - 1, need, wanted), (wanted, need - 1, wanted), (wanted, need, 0), (None, 0, 0)):
        free[0] = left
        answer = worker.answer(task, share)
        assert answer.wants == wants and (answer.record is None) is bool(wants)


def test_a_process_that_a_backend_changed_or_whose_memory_is_half_taken_judges_no_other_case(monkeypatch: Any) -> None:
    assert asked("ChangesDtype")[-1].leaves
    monkeypatch.setattr(machine, "allocated_memory", lambda: 51)
    assert asked("EAGER", limit=100)[-1].leaves and not asked("EAGER", limit=102)[-1].leaves


def test_an_explanation_has_its_time_and_is_not_asked_of_a_lost_gpu_which_ends_the_process(monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "explain", lambda failure, patience: f"{patience:.0f}")
    given = [int(asked("Wrong", explain=True, unhurried=each)[-1].record.explanation) for each in (False, True)]
    assert given[1] >= 60 > given[0]
    monkeypatch.setattr(driver, "device_lost", lambda device: True)
    _, answer = asked("LosesTheGPU", explain=True)
    record = answer.record
    assert answer.leaves and record.status is Status.FAIL and "misaligned address" in record.message


@pytest.mark.parametrize(("device", "leaves"), [("cpu", False), ("cuda", True)])
def test_after_running_out_of_a_gpus_memory_a_process_ends(monkeypatch: Any, device: str, leaves: bool) -> None:
    monkeypatch.setattr(driver, "device_lost", lambda device: False)
    worker = Worker(torch.device(device), None, lambda event: None, IN_PROCESS)
    record = asked("EAGER", "new_tokens:heads=128;q=[1000000];lse=0")[-1].record
    assert record.status is Status.UNAVAILABLE and worker._leaves(record, disturbed=False) is leaves


@pytest.mark.parametrize(("error", "status"), [("out of memory", machine.LACKED_MEMORY), ("misaligned address", None)])
def test_a_process_that_a_full_gpu_ends_blames_no_kernel(monkeypatch: Any, error: str, status: int | None) -> None:
    monkeypatch.setattr(room, "start_kernel_process", Mock(side_effect=RuntimeError(f"CUDA error: {error}")))
    monkeypatch.setattr(machine, "leave", sys.exit)
    with pytest.raises(SystemExit if status else RuntimeError) as ended:
        room.serve(SimpleNamespace(), SimpleNamespace(memory=None))  # type: ignore[arg-type]
    assert getattr(ended.value, "code", None) == status
