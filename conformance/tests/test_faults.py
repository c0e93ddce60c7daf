"""Every way to misbehave is the verdict of the one case on which it happened, and costs no other case its own."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from mla_conformance.commands.console import run_and_report
from mla_conformance.engine.folder import LOG_NAME, RunFolder
from mla_conformance.engine.place import KEPT_BYTES
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.report.json_report import load_report
from mla_conformance.tests.reports import unexplained

FAULTY, HANGING = CASES = ("no_side_effects:q=[7,4];out=1", "no_side_effects:q=[2]")
PASS = (Status.PASS, "", "")
FORBIDS_SIGNALS = ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6
"""Whether the system can, by the version of its Landlock; Linux from 6.12 on."""
HANGS = ("Loops", "KeepsTheInterpreterLock", "StopsItself")
_DIED = "the process died during this case: "
OF_PROCESSES: dict[str, tuple[Status, str, str]] = {
    **dict.fromkeys(("Killed", "KillsItsGroup", "KillsItsParent"), (Status.CRASH, "", f"{_DIED}Killed")),
    **dict.fromkeys(("InterruptsItself", "LeavesAChildAndAborts"), (Status.CRASH, "", _DIED)),
    "Segfault": (Status.CRASH, "", f"{_DIED}Segmentation fault"),
    "ExitsAtOnce": (Status.CRASH, "", f"{_DIED}exit status 0"),
    **dict.fromkeys(HANGS, (Status.TIMEOUT, "", "no verdict within the time")),
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
    """The folder of one run over all that touch processes."""
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


def test_each_fault_of_a_process_is_the_verdict_of_its_own_case_only_which_says_what_happened(
    records: dict[tuple[str, str], Record],
) -> None:
    expected = {(name, case): PASS for name in OF_PROCESSES for case in CASES}
    expected |= {(name, HANGING if name in HANGS else FAULTY): outcome for name, outcome in OF_PROCESSES.items()}
    found = {key: (record.status, record.check) for key, record in records.items()}
    assert found == {key: outcome[:2] for key, outcome in expected.items()}
    assert {key: said for key, (*_, said) in expected.items() if said not in records[key].message} == {}
    assert {record.confirmation for record in records.values() if record.failed} == {"alone"}
    for name in HANGS:
        assert "faults.py" in records[name, HANGING].detail and "in before" in records[name, HANGING].detail, name


def test_nothing_is_left_but_bounded_files_and_no_child_in_a_session_of_its_own(folder: Path) -> None:
    children = (folder / "children").read_text().split()
    assert len(children) == 4  # two, each confirmed
    assert not [child for child in children if Path("/proc", child).exists()]
    names = {path.name for path in (folder / "out").iterdir() if not path.is_fifo()}
    assert names == {"journal.jsonl", LOG_NAME, "report.json", "report.html"}
    assert (folder / "out" / LOG_NAME).stat().st_size <= KEPT_BYTES


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
