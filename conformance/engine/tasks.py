"""What the places of a run have still to do, and which of it a place takes next."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from math import inf

import msgspec

from mla_conformance.cases.case import Case
from mla_conformance.engine.messages import Judge, Task

_NOBODY = -1
"""Stands for a place while none has begun with what is to follow."""
ENOUGH = 200
"""Groups that take longer to judge than one kernel to compile: with fewer left nobody compiles ahead, for whom the
others would wait, and for fewer that compile no worker is started."""


class Tasks:
    """Groups of tasks: one place takes a group, since a case's backends share what was made for it.

    Attributes:
        groups: what is left.
        later: groups that are to follow, by the place that takes them, one after the other.
        rounds: groups that are to follow before those, round by round.
        ahead: number of the first place that takes of the later ones while the others have many to judge.
        dropped: calls of backends that are given up, by the backend's reference and the call.
        taken: bytes of a GPU that a place has taken for its group, where it told how many that are.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[Task]],
        later: Iterable[Sequence[Task]] = (),
        rounds: Iterable[Iterable[Sequence[Task]]] = (),
    ) -> None:
        self.dropped: set[tuple[str, str]] = set()
        self.groups, self.later = deque(map(list, groups)), {_NOBODY: deque(map(list, later))}
        self.rounds = deque(rounds)
        self.ahead: float = inf
        self.taken = Counter[int]()
        self._last: list[list[Task]] = []
        self._own: dict[int, list[Task]] = {}
        self._early: set[int] = set()
        self._large: list[tuple[int, list[Task]]] = []

    def take(self, place: int, room: float = inf, alone: bool = False) -> Task | None:
        """The next task of a place, with so much room on its GPU; none of what is to follow while it is alone there."""
        while True:
            own = self._own.setdefault(place, [])
            while own:
                task = own.pop(0)
                if not (isinstance(task, Judge) and (task.reference, call_of(task.case)) in self.dropped):
                    return task
            self.taken[place] = 0
            self._early.discard(place)
            fitting = next((large for large in self._large if large[0] <= room), None)
            if fitting:
                self._large.remove(fitting)
                self.taken[place], self._own[place] = fitting
            elif self._is_ahead(place) and not alone and any(self.later.values()):
                self._own[place] = self._next_of_later(place)
                if self.ahead:
                    self._early.add(place)
            elif self.groups:
                self._own[place] = self.groups.popleft()
            else:
                return None

    def _is_ahead(self, place: int) -> bool:
        return place >= self.ahead and (len(self.groups) > ENOUGH or not self.ahead)

    def _next_of_later(self, place: int) -> list[Task]:
        """The next of what a place goes through; it begins with half of what another one has still before it.

        So neighbours, for which the same is compiled, come to one process.
        """
        if not self.later.get(place):
            longest = max(self.later, key=lambda other: len(self.later[other]))
            theirs = self.later[longest]
            kept = 0 if longest == _NOBODY else len(theirs) // 2
            self.later[place] = deque(reversed([theirs.pop() for _ in range(len(theirs) - kept)]))
        return self.later[place].popleft()

    def defer(self, place: int, task: Task, wants: int) -> None:
        """Have a task, and what belongs to it, wait until a place has so many bytes of a GPU for it."""
        group = [task, *self._own.pop(place, ())]
        if place in self._early:  # those who have time for it would have to load a compiler
            self._last.append(group)
        else:
            self._large.append((wants, group))

    def put_back(self, place: int, task: Task) -> None:
        """Have a place take a task again."""
        self._own[place].insert(0, task)

    def set_apart(self, chosen: Callable[[Task], bool]) -> list[list[Task]]:
        """Take what is chosen out of the groups; the groups that it makes. What is to follow is not chosen ahead."""
        apart, self.groups = _divided(self.groups, chosen)
        for place, groups in self.later.items():
            last, self.later[place] = _divided(groups, chosen)
            self._last += last
        return list(apart)

    def go_on(self) -> bool:
        """Have what was to follow be next; whether that is anything."""
        if self.rounds:
            self.groups.extend(map(list, self.rounds.popleft()))
            return True
        self.ahead = 0
        self.groups.extend(self._last)
        self._last.clear()
        return bool(self.groups) or any(self.later.values())

    def judge_alone(self, task: Judge) -> None:
        """Have some place judge a case again, in a process that has judged nothing."""
        self.groups.append([msgspec.structs.replace(task, fresh=True)])

    def is_left(self) -> bool:
        """Whether a place has something to take."""
        later = not self.ahead and any(self.later.values())
        return bool(self.groups or self._large or later) or any(self._own.values())


def _divided(groups: Iterable[list[Task]], chosen: Callable[[Task], bool]) -> list[deque[list[Task]]]:
    """What is chosen of groups, and the rest of them."""
    parts = ([[task for task in group if chosen(task) is is_chosen] for group in groups] for is_chosen in (True, False))
    return [deque(filter(None, part)) for part in parts]


def call_of(case: str) -> str:
    """The call that a case is about, of its id."""
    return str(Case.parse(case).call)
