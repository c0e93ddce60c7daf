"""What was seen to run: kernels by name, libraries by digest, told apart from what torch runs for anybody."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.driving.executor import IN_PROCESS
from mla_conformance.driving.loaded import loaded_libraries
from mla_conformance.engine.devices import driver_in
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.messages import TaskReply, Trace
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.tasks import TaskOutcome, Tasks
from mla_conformance.engine.worker import Worker
from mla_conformance.judging.record import Record, Traced
from mla_conformance.judging.verdict import Status
from mla_conformance.report.outcome import ran
from mla_conformance.trials import trace
from mla_conformance.trials.trace import library_digests

CPU = torch.device("cpu")
FILL = "void at::native::vectorized_elementwise_kernel<4, FillFunctor>"


def test_the_kernels_of_torch_itself_are_left_out_and_the_rest_is_named() -> None:
    seen = Traced({"lse": ("Memset (Device)", "flash::fwd", FILL), "dcp": ("flash::fwd", "merge")})
    assert seen.distinct == ("flash::fwd", "merge")
    assert list(ran(seen)) == ["kernels seen: flash::fwd, merge"]
    assert list(ran(Traced({"lse": ("a", "b", "c" * 200)}))) == ["kernels seen: a, b and 1 more"]
    templated = "void flash::(anonymous namespace)::fwd_kernel<traits<192, 128>, bool>(params)"
    assert list(ran(Traced({"lse": (templated, templated.replace("192", "64"))}))) == [
        "kernels seen: flash::(anonymous namespace)::fwd_kernel"
    ]
    assert list(ran(Traced())) == []
    assert list(ran(Traced({"lse": (FILL,)}))) == ["only generic kernels of torch were seen to run, none of a library"]


def test_shards_put_together_keep_what_either_saw() -> None:
    first, second = Traced({"lse": ("a",)}, {"x.so": "1"}), Traced({"dcp": ("b",)}, {"y.so": "2"})
    assert first.joined(second) == Traced({"dcp": ("b",), "lse": ("a",)}, {"y.so": "2", "x.so": "1"})


def test_libraries_are_known_by_their_bytes(tmp_path: Path) -> None:
    library = tmp_path / "libkernel.so.3"
    library.write_bytes(b"machine code")
    assert library_digests({str(library)}, tmp_path / "mine.py") == {
        "./libkernel.so.3": hashlib.sha256(b"machine code").hexdigest()
    }
    assert any(path.endswith("libtorch_cpu.so") for path in loaded_libraries())


def test_a_worker_measures_one_case_of_each_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels_of(call: Callable[[], object], device: torch.device) -> tuple[str, ...]:
        call()
        return ("seen",)

    monkeypatch.setattr(trace, "kernels_of", kernels_of)
    cases = {
        "refusals": "refusals:q=[9];dtype=fp64;heads=2",
        "lse": "lse:dims=small;heads=2;q=[5,9]",
        "dtypes": "dtypes:dims=small;heads=2;q=[5];dtype=fp16",
    }
    answer = Worker(CPU, None, lambda event: None, IN_PROCESS).answer(Trace("EAGER", cases))
    assert answer.traced and answer.traced.kernels == {"lse": ("seen",), "dtypes": ("seen",)} and answer.leaves

    # A call that raises while it is measured takes nothing from the verdicts.
    def raises(*_: object) -> Traced:
        raise RuntimeError("the profiler is in use")

    monkeypatch.setattr(trace, "traced", raises)
    answer = Worker(CPU, None, lambda event: None, IN_PROCESS).answer(Trace("EAGER", {"lse": "lse:q=[4]"}))
    assert answer.traced == Traced() and answer.leaves


def test_the_driver_says_its_version() -> None:
    reported = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    assert (driver_in(reported), driver_in("")) == ("580.159.04", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tells_the_kernels_of_a_call() -> None:
    a = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    names = trace.kernels_of(lambda: a @ a, a.device)
    assert names and Traced({"product": names}).distinct


@pytest.mark.parametrize(("workers", "tasks"), [(1, 2), (9, 4)])
def test_workers_share_the_cases_that_are_traced(
    workers: int, tasks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Trace] = []

    def carried_out(groups: Tasks, *_: object) -> Iterator[TaskOutcome]:
        for (task,) in groups.groups:
            assert isinstance(task, Trace)
            asked.append(task)
            yield TaskOutcome(task, TaskReply(traced=Traced({name: (case,) for name, case in task.cases.items()})))

    cases = {"A": {"lse": "k", "v": "k2", "w": "k3"}, "B": {"lse": "l"}}
    run, written = Run(RunRequest.of(["EAGER"], ["lse"]), RunFolder.claim(tmp_path)), list[Any]()
    run.supervisor = SimpleNamespace(places=[None] * workers, run=carried_out)  # type: ignore[assignment]
    passed = [Record(x, x, name, case, Status.PASS) for x, part in cases.items() for name, case in part.items()]
    run.found.verdicts = {record.record_key: record for record in passed}
    monkeypatch.setattr(run, "_write", written.append)
    run._trace()
    assert len(asked) == tasks and all(task.cases for task in asked)
    seen = {event.backend: event.traced.kernels for event in written}
    assert seen == {name: {each: (case,) for each, case in part.items()} for name, part in cases.items()}
