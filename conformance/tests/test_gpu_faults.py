"""Faults that only a GPU has: each is the verdict of its own case, and every other case keeps its own."""

import shutil
from pathlib import Path

import pytest
import torch

from mla_conformance.commands.console import run_and_report
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.pool import Limits
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not hasattr(torch.cuda, "_compile_kernel"), reason="needs torch 2.9, which compiles kernels"),
]

CASES = ["no_side_effects:q=[5,3]", "no_side_effects:q=[7,4];out=1", "no_side_effects:q=[2]"]
FAULTY = CASES[1]
FAULTS: dict[str, tuple[Status, str, str]] = {
    "IllegalAddress": (Status.FAIL, Check.CALL, "illegal memory access"),
    "Misaligned": (Status.FAIL, Check.CALL, "misaligned address"),
    "DeviceAssert": (Status.FAIL, Check.CALL, "device-side assert"),
    "FailsAfterItReturned": (Status.FAIL, Check.CALL, "launch failure"),
    "NeverLaunches": (Status.FAIL, Check.MASK, "NaN"),
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Record]:
    """One run over all of them."""
    folder = tmp_path_factory.mktemp("gpu_faults")
    source = shutil.copy(Path(__file__).with_name("faults.py"), folder)
    request = RunRequest.of([f"{source}:{name}" for name in FAULTS], device="cuda", cases=CASES)
    run = Run(request, RunFolder.claim(folder / "out"), Limits(workers=1, timeout=300))
    assert run_and_report(run, as_json=True) == 1
    found = run.summary().records
    assert len({(record.reference, record.capability, record.case) for record in found}) == len(found)
    return {(record.backend, record.case): record for record in found}


def test_the_run_has_exactly_the_expected_verdicts(records: dict[tuple[str, str], Record]) -> None:
    expected = {(name, case): (Status.PASS, "") for name in FAULTS for case in CASES}
    expected |= {(name, FAULTY): (status, check) for name, (status, check, _) in FAULTS.items()}
    found = {key: (record.status, record.check) for key, record in records.items()}
    assert found == expected, {key: record.message for key, record in records.items() if found[key] != expected[key]}


@pytest.mark.parametrize("name", FAULTS)
def test_the_message_says_what_happened(records: dict[tuple[str, str], Record], name: str) -> None:
    assert FAULTS[name][2] in records[name, FAULTY].message
