"""What a run shares out among its workers: GPUs, cores and memory; and in which order it judges."""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.engine import machine
from mla_conformance.engine.journal import CaseStarted, Journal, JournalEvent, RunFolder
from mla_conformance.engine.machine import ALONE, CLEARED, VISIBLE, GpuPart, part_of, visible_gpus
from mla_conformance.engine.messages import Hello, Judge, Setup, Task, TaskReply
from mla_conformance.engine.place import WorkerSlot
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits, Pool
from mla_conformance.engine.tasks import TaskOutcome, Tasks, judged_on_gpu
from mla_conformance.judging.golden import memory_need, needed_bytes
from mla_conformance.judging.record import BackendFacts, Record, Status
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
        self.places: list[Mapping[str, str]] = []  # their environments
        self.log = SimpleNamespace(write_to=lambda path: None)

    def add_place(self, setup: Setup, environment: Mapping[str, str]) -> None:
        self.places.append(environment)

    def end(self, kept: int = 0) -> None:
        del self.places[kept:]

    def run(self, tasks: Tasks, part: GpuPart) -> Iterator[TaskOutcome]:
        while task := tasks.take(0):
            yield TaskOutcome(task, TaskReply(facts=BackendFacts("EAGER", "EAGER")))

    def hello(self, of_all: bool = False) -> Hello:
        return Hello(1, "cuda", {"torch": "2.13.0", "device": "a GPU"}, self._gpus, self._memory)


def with_cores(monkeypatch: pytest.MonkeyPatch, cores: Collection[int], quota: Path = Path("/nothing")) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: len(cores))
    monkeypatch.setattr(machine, "_CGROUP_CPU", quota)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is told which cores it may use")
@pytest.mark.parametrize(("quota", "cores"), [("max", 16), ("400000", 4), ("50000", 1), ("6400000", 16)])
def test_a_container_has_the_cores_of_its_quota(quota: str, cores: int, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000")
    with_cores(monkeypatch, range(16), tmp_path / "cpu.max")
    assert machine.machine_cores() == cores


Prepared = Callable[..., list[Mapping[str, str]]]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr("mla_conformance.engine.request.may_have_gpu", lambda: True)
    with_cores(monkeypatch, range(16))
    for name in ("OMP_NUM_THREADS", VISIBLE):
        monkeypatch.delenv(name, raising=False)

    def prepare(places: Places, workers: int | None = None, **asked: Any) -> list[Mapping[str, str]]:
        request = RunRequest.of(["EAGER"], **(asked or {"capabilities": ["lse"]}))
        run = Run(request, RunFolder.claim(tmp_path), Limits(workers))
        run.supervisor = places  # type: ignore[assignment]
        run.prepare()
        return places.places

    return prepare


@pytest.mark.parametrize(("cases", "workers"), [(1, 1), (39, 1), (40, 2), (1000, 4)])
def test_a_cpu_has_as_many_workers_as_are_worth_their_start(prepared: Prepared, cases: int, workers: int) -> None:
    ids = [case.id for entry in CAPABILITIES.values() for case in entry.cases][:cases]
    assert len(prepared(Places(), device="cpu", cases=ids)) == workers


@pytest.mark.parametrize(
    ("gpus", "memory", "workers", "threads"),
    [("0", 140, 6, "2"), ("0", 40, 3, "2"), ("0", 8, 1, "2"), ("01", 140, 12, "1"), ("0123", 24, 8, "2")],
)
def test_a_gpu_has_workers_as_it_has_room(prepared: Any, gpus: str, memory: int, workers: int, threads: str) -> None:
    places = prepared(Places(*gpus, memory=memory * GIB))
    assert len(places) == workers and {each["OMP_NUM_THREADS"] for each in places[1:]} <= set(threads)


@pytest.mark.parametrize(("workers", "gpus", "seen"), [(3, ("4", "GPU-7"), ["GPU-7", "4"]), (1, ("0", "1"), [])])
def test_workers_have_a_gpu_in_turn(prepared: Prepared, workers: int, gpus: tuple[str, ...], seen: list[str]) -> None:
    first, *further = prepared(Places(*gpus), workers)
    assert VISIBLE not in first and [environment[VISIBLE] for environment in further] == seen


def test_threads_and_gpus_that_the_user_has_chosen_stay(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert all("OMP_NUM_THREADS" not in each for each in prepared(Places("0")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for named, found in (("", "0,1"), ("3,5,7", "3,5"), ("GPU-a,GPU-b", "GPU-a,GPU-b")):
        monkeypatch.setenv(VISIBLE, named)
        assert visible_gpus() == tuple(found.split(","))


@pytest.mark.parametrize(
    ("whole", "steps", "said"),
    [
        (2**36, ["forgets", "waits"], r"out of memory: may need \d+ MiB, 1 MiB are free after 120 s"),
        (2**20, [], r"out of memory: may need \d+ MiB, this device has 1 MiB"),
    ],
)
def test_a_case_without_its_memory_waits_for_it(monkeypatch: Any, whole: int, steps: list[str], said: str) -> None:
    monkeypatch.setattr("mla_conformance.trials.subject.get_device_capability", lambda device: None)
    monkeypatch.setattr(judging.memory, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(judging.memory, "whole_memory", lambda device: whole)
    done: list[str] = []
    monkeypatch.setattr(Context, "forget", lambda self: done.append("forgets"))
    monkeypatch.setattr(judging.memory, "wait_for_memory", lambda *_: (done.append("waits"), 2**20)[1])  # type: ignore[func-returns-value]
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


GREEDY = """
import pathlib, torch
from mla_conformance.backends.eager import EagerPrefillBackend
class Greedy(EagerPrefillBackend):
    '''Lacks memory for three tokens always, for two the first time.'''
    def run_prefill_new_tokens(self, q, *arguments, **options):
        if len(q) in (2, 3):
            seen = pathlib.Path(__file__).with_name(f"seen{len(q)}")
            seen.open("a").write("!")
            if len(q) == 3 or seen.read_text() == "!":
                raise torch.OutOfMemoryError("others hold it")
        return super().run_prefill_new_tokens(q, *arguments, **options)
"""
COMPILES = """
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.eager import EagerPrefillBackend
class Compiles(EagerPrefillBackend):
    declaration = Declaration(distributions=("torch", "triton"))
"""
CASES = [f"lse:dims=small;heads=2;q=[{tokens}]" for tokens in range(1, 9)]
RACE = "determinism:dims=small;heads=2;q=[5]"


@dataclass
class Seen:
    # each case as it starts, with how many places are busy and the processes of all
    started: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)  # whose case it is, in the same order
    phases: list[str] = field(default_factory=list)  # what the run says that it does
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def order(self) -> list[str]:
        return [case for case, *_ in self.started]


def judged(folder: Path, backends: list[str], cases: list[str], monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen, claimed = Seen(), RunFolder.claim(folder / "out")
    with Run(RunRequest.of(backends, device="cpu", cases=cases), claimed, Limits(2)) as run:
        append = Journal.append

        def note(journal: Journal, event: JournalEvent) -> None:
            append(journal, event)
            if isinstance(event, CaseStarted):
                places = run.supervisor.places
                seen.backends.append(event.backend)
                processes = tuple(place.hello.process if place.hello else 0 for place in places)
                seen.started.append((event.case, sum(bool(place.task) for place in places), processes))

        run.prepare()
        run.supervisor.hello(of_all=True)  # a run begins with the first of them
        run.begin()
        monkeypatch.setattr(Journal, "append", note)
        monkeypatch.setattr(run, "_trace", lambda: None)
        monkeypatch.setattr(Pool, "_share_memory", lambda pool, places: None)
        run.device, run.supervisor.gpus = "cuda", 1
        run.on_record, run.on_phase = lambda record: seen.records.update({record.case: record}), seen.phases.append
        run.judge()
    return seen


def test_what_lacked_memory_beside_others_is_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    seen = judged(tmp_path, [f"{tmp_path / 'greedy.py'}:Greedy"], CASES, monkeypatch)
    beside, alone, cleared = seen.order[:-3], seen.order[-3:-1], seen.order[-1]
    assert sorted(beside) == CASES and sorted(alone) == CASES[1:3] and cleared == CASES[2]
    assert [busy for _, busy, _ in seen.started[-3:]] == [1, 1, 1]
    processes = [here for *_, here in seen.started]
    assert len({first for first, _ in processes}) == 4, "each of the three in a process that has judged nothing"
    assert processes[-1][1] != processes[-2][1], "at last the other one gives back what it holds"
    unavailable = [record.case for record in seen.records.values() if record.status is Status.UNAVAILABLE]
    assert unavailable == [CASES[2]] and len(seen.records) == len(CASES)


def test_a_case_that_neither_others_nor_a_used_process_leave_room_for_is_given_to_a_new_one() -> None:
    asked: list[tuple[GpuPart, bool]] = []
    phases: list[str] = []

    def outcomes(tasks: Tasks, part: GpuPart) -> Iterator[TaskOutcome]:
        while task := tasks.take(0, alone=part.is_alone):
            assert isinstance(task, Judge)
            asked.append((part, task.fresh))
            record = Record("A", "A", "lse", task.case, Status.PASS) if task.fresh else None
            yield TaskOutcome(task, TaskReply(record, wants=0 if record else 1))

    beside = part_of(80 * 2**30, 4)
    (done,) = judged_on_gpu(outcomes, beside, phases.append, Tasks([[Judge("A", CASES[0])]]))
    assert asked == [(beside, False), (ALONE, False), (CLEARED, False), (CLEARED, True)]
    assert phases == ["judging 1 case with the GPU for itself", "judging 1 case with all of the GPU's memory"]
    assert done.answer.record and done.answer.record.status is Status.PASS


def test_what_compiles_follows_and_races_are_watched_for_alone_at_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "compiles.py").write_text(COMPILES)
    monkeypatch.setattr("mla_conformance.engine.run.ENOUGH", 0)
    given_back, give = list[int](), WorkerSlot.give

    def note(place: WorkerSlot, task: Task | None, share: int | None = None) -> None:
        given_back.extend([] if task else [place.number])
        give(place, task, share)

    monkeypatch.setattr(WorkerSlot, "give", note)
    compiling = f"{tmp_path / 'compiles.py'}:Compiles"
    seen = judged(tmp_path, [compiling, "EAGER", "TORCH_SDPA"], [RACE, *CASES[:2]], monkeypatch)
    assert sorted(seen.backends[:4]) == ["EAGER"] * 2 + ["TORCH_SDPA"] * 2
    assert (seen.backends[4:6], seen.order[4:6]) == (["EAGER", "TORCH_SDPA"], [RACE] * 2)
    assert seen.backends[6:] == [compiling] * 3 and seen.order[8] == RACE
    assert {busy for case, busy, _ in seen.started if case == RACE} == {1}
    assert 2 in {busy for _, busy, _ in seen.started[:4]}
    assert len({here for *_, here in seen.started}) == 1, "nobody lacks memory, so that nobody begins anew"
    assert given_back == [1, 1], "the other one, before the first that has the GPU for itself"
    assert {record.status for record in seen.records.values()} == {Status.PASS}
    alone = "judging {} with the GPU for itself".format
    begun = ["judging 2 backends, compiling for others beside them", alone("2 cases")]
    assert seen.phases == [*begun, "judging the backends that compile", alone("1 case")]
