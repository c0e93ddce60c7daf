"""The order of a run: rounds of backends, and at the end what a GPU's other users disturb; a CPU takes its part."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.journal import CaseStarted, Journal, JournalEvent
from mla_conformance.engine.machine import ALONE, CLEARED, GpuPart, part_of
from mla_conformance.engine.messages import Judge, Task, TaskReply
from mla_conformance.engine.place import WorkerSlot
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits, Pool
from mla_conformance.engine.tasks import TaskOutcome, Tasks, judged_on_gpu
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status

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
    """What is seen of a run by two workers that share a GPU."""
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


def test_what_lacked_memory_beside_others_is_judged_again_and_only_then_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_compiles_follows_and_what_watches_for_races_is_judged_last_of_each_while_no_other_place_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    alone = "judging {} with the GPU for itself"
    assert seen.phases == [
        "judging 2 backends, compiling for others beside them",
        alone.format("2 cases"),
        "judging the backends that compile",
        alone.format("1 case"),
    ]
