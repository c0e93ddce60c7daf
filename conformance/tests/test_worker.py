"""A worker goes on while it has its GPU and its memory, and does not trust what a wrong kernel may have changed."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.driving import driver
from mla_conformance.driving.driver import IN_PROCESS
from mla_conformance.engine import machine
from mla_conformance.engine import worker as room
from mla_conformance.engine.messages import Judge, Step
from mla_conformance.engine.worker import Worker
from mla_conformance.judging.golden import memory_need
from mla_conformance.judging.verdict import Status

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
SMALL = "lse:dims=small;heads=2;q=[5,9]"
TOO_LARGE = "new_tokens:heads=128;q=[1000000];lse=0"


class Wrong(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        output, lse = super().run_prefill_new_tokens(*arguments, **options)
        return output, lse + 1


class ChangesDtype(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().run_prefill_new_tokens(*arguments, **options)


class LosesTheGPU(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address")


def reference(kernel: type[EagerPrefillBackend]) -> str:
    return f"{kernel.__module__}:{kernel.__name__}"


def asked(kernel: type[EagerPrefillBackend], case: str = SMALL, limit: int | None = None, **task: Any) -> list[Any]:
    """What a new worker says on a case, its answer last."""
    said: list[Any] = []
    answer = Worker(CPU, limit, said.append, IN_PROCESS).answer(Judge(reference(kernel), case, **task))
    return [*said, answer]


def test_a_case_and_those_before_are_announced_before_they_are_judged_and_a_pass_keeps_the_process() -> None:
    first = "lse:dims=small;heads=2;q=[3]"
    *started, answer = asked(EagerPrefillBackend, before=((reference(EagerPrefillBackend), first),))
    assert [event.step for event in started] == [Step.STARTED] * 2
    assert [event.record.case for event in started] == [first, SMALL]
    assert answer.record.case == SMALL and answer.record.status is Status.PASS and not answer.leaves


def test_a_case_waits_for_what_it_needs_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes its part."""
    worker, free = Worker(CPU, None, lambda event: None, IN_PROCESS), [2**40]
    for name in ("set_per_process_memory_fraction", "memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(room, "free_memory", lambda device: free[0])
    monkeypatch.setattr(room, "whole_memory", lambda device: 2**42)
    task, need = Judge(reference(EagerPrefillBackend), SMALL), memory_need(Case.parse(SMALL), "cpu")
    wanted = worker.answer(task, need).wants
    assert wanted == need + 2 * GIB, "inputs and golden results are kept for cases to come"
    for share, left, wants in ((wanted - 1, need, wanted), (wanted, need - 1, wanted), (wanted, need, 0), (None, 0, 0)):
        free[0] = left
        answer = worker.answer(task, share)
        assert answer.wants == wants and (answer.record is None) is bool(wants)


def test_a_failure_is_told_before_it_is_explained_if_it_is_all_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "explain", lambda failure, patience: "as one that is off by one")
    _, judged, answer = asked(Wrong, explain=True)
    assert judged.step is Step.JUDGED and not judged.record.explanation
    assert answer.record.explanation == "as one that is off by one" and not answer.leaves
    assert (answer.found.heat.part, answer.found.heat.wrong) == ("LSE of new tokens", 2 * 14)
    assert asked(Wrong)[-1].found.heat is None
    monkeypatch.setattr(room, "explain", lambda failure, patience: f"{patience:.0f}")
    given = [int(asked(Wrong, explain=True, unhurried=each)[-1].record.explanation) for each in (False, True)]
    assert given[1] >= 60 > given[0]


def test_a_process_that_a_backend_changed_or_whose_memory_is_half_taken_judges_no_other_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked(ChangesDtype)[-1].leaves
    monkeypatch.setattr(machine, "allocated_memory", lambda: 51)
    assert asked(EagerPrefillBackend, limit=100)[-1].leaves
    assert not asked(EagerPrefillBackend, limit=102)[-1].leaves


def test_a_lost_gpu_ends_the_process_and_is_not_asked_for_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "device_lost", lambda device: True)
    _, answer = asked(LosesTheGPU, explain=True)
    record = answer.record
    assert answer.leaves and record.status is Status.FAIL and "misaligned address" in record.message


@pytest.mark.parametrize(("device", "leaves"), [("cpu", False), ("cuda", True)])
def test_after_running_out_of_a_gpus_memory_a_process_judges_no_other_case(
    monkeypatch: pytest.MonkeyPatch, device: str, leaves: bool
) -> None:
    monkeypatch.setattr(driver, "device_lost", lambda device: False)
    worker = Worker(torch.device(device), None, lambda event: None, IN_PROCESS)
    record = asked(EagerPrefillBackend, TOO_LARGE)[-1].record
    assert record.status is Status.UNAVAILABLE and worker._leaves(record, disturbed=False) is leaves


@pytest.mark.parametrize(
    ("error", "status"),
    [("CUDA error: out of memory", machine.LACKED_MEMORY), ("CUDA error: misaligned address", None)],
)
def test_a_process_that_a_full_gpu_ends_blames_no_kernel(
    monkeypatch: pytest.MonkeyPatch, error: str, status: int | None
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError(error)

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(room, "start_kernel_process", fail)
    monkeypatch.setattr(machine, "leave", leave)
    with pytest.raises(SystemExit if status else RuntimeError) as ended:
        room.serve(SimpleNamespace(), SimpleNamespace(memory=None))  # type: ignore[arg-type]
    assert getattr(ended.value, "code", None) == status
