"""Cases that have a GPU for themselves: they watch for races, take much of its memory, or lacked it beside others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mla_conformance.engine.messages import Judge, Task
from mla_conformance.engine.supervisor import TaskOutcome, Tasks
from mla_conformance.report.terminal import counted

_UNDISTURBED = frozenset(("determinism", "large_offsets", "many_rows", "streams"))
"""Capabilities that watch for races, or take much of a GPU's memory."""


class Outcomes(Protocol):
    """Has tasks carried out."""

    def __call__(self, tasks: Tasks, share: int | None = None, alone: bool = False) -> Iterator[TaskOutcome]:
        """Within a share of a GPU's memory, or alone on it."""


@dataclass(frozen=True)
class OnGpu:
    """How the workers of a run have its GPUs.

    Attributes:
        outcomes: has tasks carried out.
        share: bytes of a GPU for each worker; None without a limit.
        on_phase: is told what goes on.
    """

    outcomes: Outcomes
    share: int | None
    on_phase: Callable[[str], None]

    def judged(self, tasks: Tasks) -> Iterator[TaskOutcome]:
        """What comes of cases; of those that need their GPU for themselves once the others are judged."""
        while True:
            alone = tasks.set_apart(_is_undisturbed)
            for outcome in self.outcomes(tasks, self.share):
                if lacking := _lacked_memory(outcome):
                    alone.append([lacking])
                else:
                    yield outcome
            if alone:
                yield from self._judged_alone(tasks, alone)
            if not tasks.go_on():
                return
            self.on_phase("judging the backends that compile")

    def _judged_alone(self, tasks: Tasks, groups: list[list[Task]]) -> Iterator[TaskOutcome]:
        """What comes of cases while nothing else runs on their GPU; one that lacks memory has a process of its own."""
        self.on_phase(f"judging {counted(sum(map(len, groups)), 'case')} with the GPU for itself")
        tasks.groups.extend(groups)
        for outcome in self.outcomes(tasks, alone=True):
            lacking = _lacked_memory(outcome, alone=True)
            if lacking and lacking is not outcome.task:
                tasks.groups.append([lacking])
            else:
                yield outcome


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
