"""A process goes on while it has its GPU and its memory, and does not trust what a wrong kernel may have changed."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cases.case_files import write_case
from mla_conformance.cli import main
from mla_conformance.judging.golden import expect
from mla_conformance.judging.verdict import Check, Status, Verdict, failed
from mla_conformance.problems.build import build_problem
from mla_conformance.running import retirement as room
from mla_conformance.running.retirement import Retirement, retirement

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
PASSED, LACKING = Verdict(Status.PASS, ""), Verdict(Status.UNAVAILABLE, "out of memory")
WRONG = failed(Check.MASK, "wrong")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Plays a GPU of which so much is free."""

    def has(share: float) -> None:
        monkeypatch.setattr(room, "device_lost", lambda device: False)
        monkeypatch.setattr(room, "free_memory", lambda device: share * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=GIB))

    return has


@pytest.mark.parametrize(
    ("verdict", "share", "expected"),
    [
        (LACKING, 0.95, None),
        (LACKING, 0.8, Retirement.OUT_OF_MEMORY),
        (PASSED, 0.1, None),
        (WRONG, 0.1, None),
    ],
)
def test_after_running_out_of_memory_a_process_goes_on_if_it_is_back(
    gpu: Callable[[float], None], verdict: Verdict, share: float, expected: Retirement | None
) -> None:
    gpu(share)
    assert retirement(CUDA, verdict, None) is expected


def test_a_lost_gpu_comes_before_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "device_lost", lambda device: True)
    assert retirement(CUDA, LACKING, None) is Retirement.DEVICE_LOST


def test_a_process_that_has_taken_half_of_its_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "allocated_memory", lambda: 51)
    assert retirement(CPU, PASSED, 100) is Retirement.OUT_OF_MEMORY
    assert retirement(CPU, PASSED, 102) is None


@pytest.mark.parametrize(("verdict", "anew"), [(PASSED, False), (WRONG, True), (LACKING, True)])
def test_what_a_wrong_kernel_may_have_written_over_is_made_anew(verdict: Verdict, anew: bool) -> None:
    case = Case.parse("lse:dims=small;q=[5]")
    golden = expect(build_problem(case, CPU)).calls[0]
    assert retirement(CPU, verdict, None) is None
    again = expect(build_problem(case, CPU)).calls[0]
    assert (again is golden) == (not anew)


_BACKENDS = """
from mla_conformance.backends.eager import EagerPrefillBackend


class Honest(EagerPrefillBackend): ...


class Wrong(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments, **options):
        output, lse = super().run_prefill_new_tokens(*arguments, **options)
        return output + 1, lse


class SpoilsItsOwn(EagerPrefillBackend):
    calls = 0

    def run_prefill_new_tokens(self, q, *arguments, **options):
        self.calls += 1
        if self.calls > 1:
            q.fill_(1.0)
        return super().run_prefill_new_tokens(q, *arguments, **options)
"""


def test_a_wrong_backend_with_its_own_inputs_fails(tmp_path: Path) -> None:
    records = judged(tmp_path, "Honest", "Wrong")
    assert (records["Honest"]["status"], records["Wrong"]["status"]) == ("pass", "fail")


def test_a_backend_that_writes_over_its_own_inputs_fails(tmp_path: Path) -> None:
    records = judged(tmp_path, "Honest", "SpoilsItsOwn", case="determinism:dims=small;heads=2;q=[5,9]")
    assert (records["Honest"]["status"], records["SpoilsItsOwn"]["status"]) == ("pass", "fail")


def judged(folder: Path, *names: str, case: str = "lse:dims=small;heads=2;q=[5,9]") -> dict[str, dict[str, str]]:
    """Records of one case, judged in this order in one process."""
    source = folder / "backends.py"
    source.write_text(textwrap.dedent(_BACKENDS))
    file = folder / "cases" / "one.json"
    file.parent.mkdir()
    write_case(file, Case.parse(case))
    backends = [word for name in names for word in ("--backend", f"{source}:{name}")]
    out = folder / "out"
    main(["certify", *backends, "--cases", str(file.parent), "--device", "cpu", "-n", "1", "--out", str(out)])
    events = map(json.loads, (out / "journal.jsonl").read_text().splitlines())
    return {event["record"]["backend"]: event["record"] for event in events if event["event"] == "verdict"}
