"""Cases that have a GPU for themselves: they watch for races, take much of its memory, or lacked it beside others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mla_conformance.engine.devices import ALONE, GpuPart
from mla_conformance.engine.messages import Judge, Task
from mla_conformance.engine.supervisor import TaskOutcome, Tasks
from mla_conformance.report.terminal import counted

_UNDISTURBED = frozenset(("determinism", "large_offsets", "many_rows", "streams"))
"""Capabilities that watch for races, or take much of a GPU's memory."""


class Outcomes(Protocol):
    """Has tasks carried out."""

    def __call__(self, tasks: Tasks, part: GpuPart) -> Iterator[TaskOutcome]:
        """By places that have such a part of their GPUs."""


@dataclass(frozen=True)
class OnGpu:
    """How the workers of a run have its GPUs.

    Attributes:
        outcomes: has tasks carried out.
        parts: what each worker has of a GPU, one after the other; what exceeds the last has a GPU for itself.
        on_phase: is told what goes on.
    """

    outcomes: Outcomes
    parts: Sequence[GpuPart]
    on_phase: Callable[[str], None]

    def judged(self, tasks: Tasks) -> Iterator[TaskOutcome]:
        """What comes of cases; of those that need their GPU for themselves once the others are judged."""
        while True:
            alone = tasks.set_apart(_is_undisturbed)
            yield from self._judged_beside(tasks)
            tasks.groups.extend(alone)
            if tasks.groups:
                yield from self._judged_alone(tasks)
            next_is = "the backends that compile" if not tasks.rounds else "the next backends"
            if not tasks.go_on():
                return
            self.on_phase(f"judging {next_is}")

    def _judged_beside(self, tasks: Tasks) -> Iterator[TaskOutcome]:
        """What comes of cases that share a GPU; those that lack memory even with the last part are left."""
        for number, part in enumerate(self.parts):
            if number and tasks.groups:
                self.on_phase(f"judging {_counted(tasks)} with more memory for each")
            lacking = list[list[Task]]()
            for outcome in self.outcomes(tasks, part):
                if task := _lacked_memory(outcome):
                    lacking.append([task])
                else:
                    yield outcome
            tasks.groups.extend(lacking)
            if not lacking:
                return

    def _judged_alone(self, tasks: Tasks) -> Iterator[TaskOutcome]:
        """What comes of cases while nothing else runs on their GPU; one that lacks memory has a process of its own."""
        self.on_phase(f"judging {_counted(tasks)} with the GPU for itself")
        for outcome in self.outcomes(tasks, ALONE):
            lacking = _lacked_memory(outcome, alone=True)
            if lacking and lacking is not outcome.task:
                tasks.groups.append([lacking])
            else:
                yield outcome


def _counted(tasks: Tasks) -> str:
    return counted(sum(map(len, tasks.groups)), "case")


def _is_undisturbed(task: Task) -> bool:
    """Whether a case is to have its GPU for itself."""
    return isinstance(task, Judge) and task.case.partition(":")[0] in _UNDISTURBED


def _lacked_memory(outcome: TaskOutcome, alone: bool = False) -> Judge | None:
    """What to do instead of a case for which there was no memory; None if there was.

    Others may have held it, or, of a case that was alone, the process itself.
    """
    task, record = outcome.task, outcome.answer.record
    if not isinstance(task, Judge):
        return None
    if record is None and not alone:
        return task
    if record is not None and not record.lacked_memory:
        return None
    return task if task.fresh else msgspec.structs.replace(task, fresh=True)
