"""Every way to misbehave is the verdict of the one case on which it happened, and costs no other case its own."""

import shutil
from pathlib import Path

import pytest

from mla_conformance.commands.console import run_and_report
from mla_conformance.isolation.bounded_log import KEPT_BYTES
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.running.certify import LOG_NAME, Run
from mla_conformance.running.selection import Selection

CASES = ["no_side_effects:q=[5,3]", "no_side_effects:q=[7,4];out=1", "no_side_effects:q=[2]"]
FAULTY = CASES[1]
CRASH, TIMEOUT = (Status.CRASH, ""), (Status.TIMEOUT, "")
FAULTS: dict[str, tuple[Status, str]] = {
    "Segfault": CRASH,
    "Abort": CRASH,
    "DividesByZero": CRASH,
    "Killed": CRASH,
    "ExitsAtOnce": CRASH,
    "Loops": TIMEOUT,
    "Sleeps": TIMEOUT,
    "Deadlocks": TIMEOUT,
    "KeepsTheInterpreterLock": TIMEOUT,
    "Exits": (Status.FAIL, Check.CALL),
    "RaisesTheUnspeakable": (Status.FAIL, Check.CALL),
    "Floods": (Status.PASS, ""),  # to print is no fault of a kernel; only the log must not grow with it
    "Forks": (Status.PASS, ""),  # the child is ended where it comes back
    "ClosesStdout": (Status.FAIL, Check.PROCESS_STATE),
    "ChangesDtype": (Status.FAIL, Check.PROCESS_STATE),
    "ChangesDevice": (Status.FAIL, Check.PROCESS_STATE),
    "Seeds": (Status.FAIL, Check.PROCESS_STATE),
    "ChangesEnvironment": (Status.FAIL, Check.PROCESS_STATE),
    "ChangesDirectory": (Status.FAIL, Check.PROCESS_STATE),
    "Leaks": (Status.UNAVAILABLE, ""),
    "MutatesInputs": (Status.FAIL, Check.MUTATED_INPUT),
    "ReturnsViewOfInput": (Status.FAIL, Check.OUT_TENSOR),
    "WritesPastOutput": (Status.FAIL, Check.OUT_OF_BOUNDS_WRITE),
    "ReturnsInput": (Status.FAIL, Check.OUTPUT),
    "ReturnsItsBuffer": (Status.FAIL, Check.STALE_RESULT),
    "WrongCount": (Status.FAIL, Check.SHAPE),
    "WrongShape": (Status.FAIL, Check.SHAPE),
    "WrongDtype": (Status.FAIL, Check.DTYPE),
    "WrongDevice": (Status.FAIL, Check.DEVICE),
    "OnlyNaN": (Status.FAIL, Check.MASK),
}
TIMEOUT_SECONDS = 8.0
MEMORY = 6 * 2**30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run over all of them."""
    folder = tmp_path_factory.mktemp("faults")
    source = shutil.copy(Path(__file__).with_name("faults.py"), folder)
    selection = Selection.of([f"{source}:{name}" for name in FAULTS], [], "full", "cpu", CASES)
    run = Run(selection, folder, workers=2, timeout=TIMEOUT_SECONDS, memory=MEMORY)
    assert run_and_report(run, as_json=True) == 1
    return run


@pytest.fixture(scope="module")
def records(run: Run) -> dict[tuple[str, str], Record]:
    found = run.summary().records
    by_case = {(record.backend, record.case): record for record in found}
    assert len(by_case) == len(found)
    return by_case


def test_the_run_has_exactly_the_expected_verdicts(records: dict[tuple[str, str], Record]) -> None:
    expected = {(name, case): (Status.PASS, "") for name in FAULTS for case in CASES}
    expected |= {(name, FAULTY): outcome for name, outcome in FAULTS.items()}
    assert {key: (record.status, record.check) for key, record in records.items()} == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Exits", "SystemExit: 0"),
        ("RaisesTheUnspeakable", "Unspeakable"),
        ("Leaks", "you tried to allocate 67108864 bytes"),
        ("ChangesDtype", "default dtype from torch.float32 to torch.float64"),
        ("ChangesDevice", "default device from cpu to meta"),
        ("ChangesEnvironment", "environment variable PATH"),
        ("ClosesStdout", "a standard stream"),
        ("Segfault", "the process died during this case"),
        ("Loops", "no verdict within the time"),
    ],
)
def test_the_message_says_what_happened(records: dict[tuple[str, str], Record], name: str, said: str) -> None:
    assert said in records[name, FAULTY].message


@pytest.mark.parametrize("name", ["Loops", "Sleeps", "Deadlocks", "KeepsTheInterpreterLock"])
def test_a_hang_shows_where_it_hung(records: dict[tuple[str, str], Record], name: str) -> None:
    assert "faults.py" in records[name, FAULTY].detail and "in before" in records[name, FAULTY].detail


def test_nothing_is_left_but_bounded_files(run: Run) -> None:
    assert {path.name for path in run.directory.iterdir()} - {"faults.py", "__pycache__"} == {
        "journal.jsonl", "pytest.log", "report.json", "report.html",
    }  # fmt: skip
    assert (run.directory / LOG_NAME).stat().st_size <= KEPT_BYTES
