"""What the places of a run have still to do, in which order, and which of it a place takes next."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

import msgspec

from mla_conformance.cases.case import Case
from mla_conformance.engine.machine import ALONE, CLEARED, GpuPart
from mla_conformance.engine.messages import Explore, Judge, Task, TaskReply
from mla_conformance.report.causes import grouped
from mla_conformance.report.terminal import counted

_PIECE = 20  # tasks of which a place compiles for one after the other, while others have pieces of their own
# Groups that take longer to judge than one kernel to compile: with fewer left nobody compiles ahead, for whom the
# others would wait, and for fewer that compile no worker is started.
ENOUGH = 200
# Capabilities that watch for races, or take much of a GPU's memory: their cases have a GPU for themselves.
_UNDISTURBED = frozenset(("determinism", "large_offsets", "many_rows", "streams"))
Groups = Iterable[Sequence[Task]]
CaseGroup = Sequence[Judge | Explore]  # what one worker takes: a case of several backends, which share what is made


@dataclass(frozen=True)
class TaskOutcome:
    task: Task
    answer: TaskReply  # to it; if the process ended over it, what that says of the case that was judged
    ended: str = ""  # how the process ended, if it did
    history: Sequence[tuple[str, str]] = ()  # what the same process was given to judge before, the task included


class Tasks:
    def __init__(self, groups: Groups, later: Groups = (), rounds: Iterable[Groups] = ()) -> None:
        self.dropped: set[tuple[str, str]] = set()  # given up calls of backends, by the backend's reference
        self.groups = deque(map(list, groups))
        self.later = deque(map(list, later))  # are to follow
        self.rounds = deque(rounds)  # are to follow before those
        self.ahead: float = inf  # the first place that takes of the later ones while others have many to judge
        self.taken = Counter[int]()  # bytes of a GPU that a place has for its group, where it told how many
        self._last: list[list[Task]] = []
        self._own: dict[int, list[Task]] = {}
        self._large: list[tuple[int, list[Task]]] = []

    def take(self, place: int, room: float = inf, alone: bool = False) -> Task | None:
        while True:
            own = self._own.setdefault(place, [])
            while own:
                task = own.pop(0)
                gone = self.dropped and isinstance(task, Judge) and (task.reference, call_of(task.case)) in self.dropped
                if not gone:
                    return task
            self.taken[place] = 0
            fitting = next((large for large in self._large if large[0] <= room), None)
            is_ahead = place >= self.ahead and (len(self.groups) > ENOUGH or not self.ahead)
            if fitting:
                self._large.remove(fitting)
                self.taken[place], self._own[place] = fitting
            elif is_ahead and not alone and self.later:
                self._own[place] = self.later.popleft()
            elif self.groups:
                self._own[place] = self.groups.popleft()
            else:
                return None

    def defer(self, place: int, task: Task, wants: int) -> None:
        self._large.append((wants, [task, *self._own.pop(place, ())]))

    def put_back(self, place: int, task: Task) -> None:
        self._own[place].insert(0, task)

    def set_apart(self) -> list[list[Task]]:
        """Take what is to have its GPU for itself out of the groups; of what is to follow, behind the rest of it."""

        def is_apart(task: Task) -> bool:
            return isinstance(task, Judge) and task.case.partition(":")[0] in _UNDISTURBED

        def taken_out(groups: deque[list[Task]]) -> list[list[Task]]:
            apart = [[task for task in group if is_apart(task)] for group in groups]
            rest = [[task for task in group if not is_apart(task)] for group in groups]
            groups.clear()
            groups.extend(filter(None, rest))
            return list(filter(None, apart))

        self._last += taken_out(self.later)
        return taken_out(self.groups)

    def go_on(self) -> bool:
        """Have what was to follow be next; whether that is anything."""
        if self.rounds:
            self.groups.extend(map(list, self.rounds.popleft()))
            return True
        self.ahead = 0
        self.groups.extend(self._last)
        self._last.clear()
        return bool(self.groups or self.later)

    def is_left(self) -> bool:
        return bool(self.groups or self._large or (self.later and not self.ahead)) or any(self._own.values())


def call_of(case: str) -> str:
    return str(Case.parse(case).call)


def judged_on_gpu(
    outcomes: Callable[[Tasks, GpuPart], Iterator[TaskOutcome]],  # by places that have such a part of their GPUs
    beside: GpuPart,  # what each worker has of a GPU beside the others; what exceeds that has a GPU for itself
    on_phase: Callable[[str], None],
    tasks: Tasks,
) -> Iterator[TaskOutcome]:
    def count() -> str:
        return counted(sum(map(len, tasks.groups)), "case")

    while True:
        alone = tasks.set_apart()
        for part in (beside, ALONE):
            if part is ALONE:
                tasks.groups.extend(alone)
                if not tasks.groups:
                    continue
                on_phase(f"judging {count()} with the GPU for itself")
            lacking = list[list[Task]]()
            for outcome in outcomes(tasks, part):
                if task := _lacked_memory(outcome):
                    lacking.append([task])
                else:
                    yield outcome
            tasks.groups.extend(lacking)
        if tasks.groups:
            on_phase(f"judging {count()} with all of the GPU's memory")
            for outcome in outcomes(tasks, CLEARED):  # what lacks memory then, too, has a process of its own
                task = _lacked_memory(outcome, cleared=True)
                if task and task is not outcome.task:
                    tasks.groups.append([task])
                else:
                    yield outcome
        next_is = "the backends that compile" if not tasks.rounds else "the next backends"
        if not tasks.go_on():
            return
        on_phase(f"judging {next_is}")


def _lacked_memory(outcome: TaskOutcome, cleared: bool = False) -> Judge | None:
    """What to do instead of a case that lacked memory, which its own process may hold; None if it did not."""
    task, record = outcome.task, outcome.answer.record
    if not isinstance(task, Judge):
        return None
    if record is None and not cleared:
        return task
    if record is not None and not record.lacked_memory:
        return None
    return task if task.fresh else msgspec.structs.replace(task, fresh=True)


def rounds_of(groups: Iterable[CaseGroup]) -> list[list[CaseGroup]]:
    """The groups in rounds of whole roles, what most backends have first: some are done even if the run is cut short.

    Backends of one role stay side by side, since they share inputs and golden results.
    """
    roles = [(group, Case.parse(group[0].case).role if isinstance(group[0], Judge) else "") for group in groups]
    having = defaultdict[str, set[str]](set)
    for group, role in roles:
        having[role] |= {task.reference for task in group}
    rounds = grouped(roles, lambda each: frozenset(having[each[1]]))
    return [[group for group, _ in rounds[having]] for having in sorted(rounds, key=len, reverse=True)]


def alike(groups: Iterable[CaseGroup]) -> list[list[Judge | Explore]]:
    """Tasks in pieces, for each of which a library compiles the same, or nearly: of one dtype and dimensions."""

    def compiled_for(task: Judge | Explore) -> tuple[str, ...]:
        return ((case := Case.parse(task.case)).dtype, case.dims) if isinstance(task, Judge) else ()

    kinds = grouped(chain.from_iterable(groups), compiled_for).values()
    return [tasks[first : first + _PIECE] for tasks in kinds for first in range(0, len(tasks), _PIECE)]
