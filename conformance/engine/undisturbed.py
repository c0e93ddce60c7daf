"""Cases that have a GPU for themselves: they watch for races, take much of its memory, or lacked it beside others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mla_conformance.engine.devices import ALONE, CLEARED, GpuPart
from mla_conformance.engine.messages import Judge, Task
from mla_conformance.engine.supervisor import TaskOutcome
from mla_conformance.engine.tasks import Tasks
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
        beside: what each worker has of a GPU beside the others; what exceeds that has a GPU for itself.
        on_phase: is told what goes on.
    """

    outcomes: Outcomes
    beside: GpuPart
    on_phase: Callable[[str], None]

    def judged(self, tasks: Tasks) -> Iterator[TaskOutcome]:
        """What comes of cases; of those that need their GPU for themselves once the others are judged."""
        while True:
            alone = tasks.set_apart(_is_undisturbed)
            yield from self._judged_in(self.beside, tasks)
            tasks.groups.extend(alone)
            if tasks.groups:
                self.on_phase(f"judging {_counted(tasks)} with the GPU for itself")
                yield from self._judged_in(ALONE, tasks)
            if tasks.groups:
                yield from self._judged_cleared(tasks)
            next_is = "the backends that compile" if not tasks.rounds else "the next backends"
            if not tasks.go_on():
                return
            self.on_phase(f"judging {next_is}")

    def _judged_in(self, part: GpuPart, tasks: Tasks) -> Iterator[TaskOutcome]:
        """What comes of cases that have this part of a GPU; those that lack memory in it are left."""
        lacking = list[list[Task]]()
        for outcome in self.outcomes(tasks, part):
            if task := _lacked_memory(outcome):
                lacking.append([task])
            else:
                yield outcome
        tasks.groups.extend(lacking)

    def _judged_cleared(self, tasks: Tasks) -> Iterator[TaskOutcome]:
        """What comes of cases while no other process has used the GPU; one that lacks memory then has a new one."""
        self.on_phase(f"judging {_counted(tasks)} with all of the GPU's memory")
        for outcome in self.outcomes(tasks, CLEARED):
            lacking = _lacked_memory(outcome, cleared=True)
            if lacking and lacking is not outcome.task:
                tasks.groups.append([lacking])
            else:
                yield outcome


def _counted(tasks: Tasks) -> str:
    return counted(sum(map(len, tasks.groups)), "case")


def _is_undisturbed(task: Task) -> bool:
    """Whether a case is to have its GPU for itself."""
    return isinstance(task, Judge) and task.case.partition(":")[0] in _UNDISTURBED


def _lacked_memory(outcome: TaskOutcome, cleared: bool = False) -> Judge | None:
    """What to do instead of a case for which there was no memory; None if there was.

    Others may have held it, or, where they have given it back, the process itself.
    """
    task, record = outcome.task, outcome.answer.record
    if not isinstance(task, Judge):
        return None
    if record is None and not cleared:
        return task
    if record is not None and not record.lacked_memory:
        return None
    return task if task.fresh else msgspec.structs.replace(task, fresh=True)
