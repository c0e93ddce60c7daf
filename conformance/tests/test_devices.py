"""What a run shares out among its workers: GPUs, cores, and a GPU's memory."""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.engine import machine
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.machine import VISIBLE, GpuPart, visible_gpus
from mla_conformance.engine.messages import Hello, Setup, TaskReply
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits
from mla_conformance.engine.tasks import TaskOutcome, Tasks
from mla_conformance.judging.golden import memory_need, needed_bytes
from mla_conformance.judging.record import BackendFacts
from mla_conformance.judging.verdict import Status
from mla_conformance.trials import trial as judging
from mla_conformance.trials.subject import Subject, device_reasons
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CUDA = torch.device("cuda")
GIB = 2**30


class Places:
    """Takes the part of a supervisor on a machine with these GPUs."""

    def __init__(self, *gpus: str, memory: int = 140 * GIB) -> None:
        self._gpus, self._memory = gpus, memory
        self.environments: list[Mapping[str, str]] = []
        self.log = SimpleNamespace(write_to=lambda path: None)

    def add_place(self, setup: Setup, environment: Mapping[str, str]) -> None:
        self.environments.append(environment)

    @property
    def places(self) -> list[Mapping[str, str]]:
        return self.environments

    def end(self, kept: int = 0) -> None:
        del self.environments[kept:]

    def run(self, tasks: Tasks, part: GpuPart) -> Iterator[TaskOutcome]:
        while task := tasks.take(0):
            yield TaskOutcome(task, TaskReply(facts=BackendFacts("EAGER", "EAGER")))

    def hello(self, of_all: bool = False) -> Hello:
        return Hello(1, "cuda", {"torch": "2.13.0", "device": "a GPU"}, self._gpus, self._memory)


def with_cores(monkeypatch: pytest.MonkeyPatch, cores: Collection[int], quota: Path = Path("/nothing")) -> None:
    """A machine on which this process may use these cores, in a control group with this quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: len(cores))
    monkeypatch.setattr(machine, "_CGROUP_CPU", quota)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is told which cores it may use")
@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 16), ("400000 100000", 4), ("50000 100000", 1), ("6400000 100000", 16)]
)
def test_a_container_has_the_cores_of_its_quota(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota, encoding="ascii")
    with_cores(monkeypatch, range(16), tmp_path / "cpu.max")
    assert machine.machine_cores() == cores


@pytest.fixture
def with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Places]:
    """The places of a run on a machine of 16 cores, by its GPUs."""
    monkeypatch.setattr("mla_conformance.engine.request.may_have_gpu", lambda: True)
    with_cores(monkeypatch, range(16))
    for name in ("OMP_NUM_THREADS", VISIBLE):
        monkeypatch.delenv(name, raising=False)

    def prepared(places: Places, workers: int | None = None, capability: str = "lse") -> Places:
        run = Run(RunRequest.of(["EAGER"], [capability]), RunFolder.claim(tmp_path), Limits(workers))
        run.supervisor = places  # type: ignore[assignment]
        run.prepare()
        return places

    return prepared


@pytest.mark.parametrize(("cases", "workers"), [(1, 1), (39, 1), (40, 2), (1000, 4)])
def test_a_cpu_has_as_many_workers_as_are_worth_their_start(
    cases: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch, range(16))
    ids = [case.id for entry in CAPABILITIES.values() for case in entry.cases][:cases]
    run = Run(RunRequest.of(["EAGER"], device="cpu", cases=ids), RunFolder.claim(tmp_path))
    run.supervisor = places = Places()  # type: ignore[assignment]
    run.prepare()
    assert len(places.environments) == workers


@pytest.mark.parametrize(
    ("gpus", "memory", "workers", "threads"),
    [("0", 140, 6, "2"), ("0", 40, 3, "2"), ("0", 8, 1, "2"), ("01", 140, 12, "1"), ("0123", 24, 8, "2")],
)
def test_a_gpu_has_as_many_workers_as_its_cores_and_memory_are_enough_for(
    with_gpus: Callable[..., Places], gpus: str, memory: int, workers: int, threads: str
) -> None:
    places = with_gpus(Places(*gpus, memory=memory * GIB))
    assert len(places.environments) == workers
    assert {each["OMP_NUM_THREADS"] for each in places.environments[1:]} <= set(threads)


@pytest.mark.parametrize(("workers", "gpus", "seen"), [(3, ("4", "GPU-7"), ["GPU-7", "4"]), (1, ("0", "1"), [])])
def test_as_many_workers_as_asked_for_have_a_gpu_in_turn(
    with_gpus: Callable[..., Places], workers: int, gpus: tuple[str, ...], seen: list[str]
) -> None:
    first, *further = with_gpus(Places(*gpus), workers).environments
    assert VISIBLE not in first and [environment[VISIBLE] for environment in further] == seen


def test_threads_that_the_user_has_chosen_stay(
    with_gpus: Callable[..., Places], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert all("OMP_NUM_THREADS" not in each for each in with_gpus(Places("0")).environments)


@pytest.mark.parametrize(
    ("named", "found"), [("", ("0", "1")), ("3,5,7", ("3", "5")), ("GPU-a,GPU-b", ("GPU-a", "GPU-b"))]
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, named: str, found: tuple[str, ...]) -> None:
    monkeypatch.setenv(VISIBLE, named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_gpus() == found


@pytest.mark.parametrize(
    ("whole", "steps", "said"),
    [
        (2**36, ["forgets", "waits"], r"out of memory: may need \d+ MiB, 1 MiB are free after 120 s"),
        (2**20, [], r"out of memory: may need \d+ MiB, this device has 1 MiB"),
    ],
)
def test_a_case_without_its_memory_is_unavailable_after_a_wait_that_may_make_it_fit(
    monkeypatch: pytest.MonkeyPatch, whole: int, steps: list[str], said: str
) -> None:
    monkeypatch.setattr("mla_conformance.trials.subject.get_device_capability", lambda device: None)
    monkeypatch.setattr(judging, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(judging, "whole_memory", lambda device: whole)
    done: list[str] = []
    monkeypatch.setattr(Context, "forget", lambda self: done.append("forgets"))

    def wait(*_: object) -> int:
        done.append("waits")
        return 2**20

    monkeypatch.setattr(judging, "wait_for_memory", wait)
    record = judging.judge_one(Subject.of("EAGER", CUDA), CAPABILITIES["lse"].cases[0], Context())
    assert done == steps
    assert record.status is Status.UNAVAILABLE and record.too_large is not bool(steps)
    assert re.fullmatch(said, record.message)


def test_far_operands_want_a_large_device_and_wait_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Case.of(capability="large_offsets", call="context_chunk", dims="small", q=(40,), kv=(40,), heads=2, far="k32")
    near = replace(far, capability="context_chunk", far="none")
    assert memory_need(far, "cuda") - memory_need(near, "cuda") == needed_bytes(far)
    device = SimpleNamespace(total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert device_reasons(far, CUDA, EagerPrefillBackend) == []
    device.total_memory = 8 << 30
    reported = "needs a device with 18 GiB of memory, this one has 8 GiB"
    assert device_reasons(far, CUDA, EagerPrefillBackend) == [reported]
