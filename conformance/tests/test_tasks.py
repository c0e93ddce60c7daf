"""What places take of what is to be judged, and in which order."""

import pytest

from mla_conformance.engine import tasks as dealing
from mla_conformance.engine.messages import Explore, Judge
from mla_conformance.engine.tasks import Tasks, call_of

CASES = [f"lse:dims=small;heads=2;q=[{tokens}]" for tokens in range(1, 6)]


def rest(tasks: Tasks, place: int, alone: bool = False) -> list[Judge]:
    """What a place takes until nothing is left."""
    found: list[Judge] = []
    while task := tasks.take(place, alone=alone):
        assert isinstance(task, Judge)
        found.append(task)
    return found


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is enough to be ahead of."""
    monkeypatch.setattr(dealing, "ENOUGH", 0)


@pytest.mark.usefixtures("_few")
def test_some_places_are_ahead_at_what_follows_while_others_have_enough_to_judge() -> None:
    now, later = ([[Judge(name, case)] for case in CASES] for name in ("A", "B"))
    tasks = Tasks(now, later)
    tasks.ahead = 2
    taken = [task.reference for place in (0, 1, 2, 2, 0) if (task := tasks.take(place))]
    assert taken == ["A", "A", "B", "B", "A"]
    assert [task.reference for task in rest(tasks, 2, alone=True)] == ["A"] * (len(CASES) - 3)
    assert not tasks.take(2) and not tasks.is_left(), "what follows waits until the others are done"
    assert tasks.go_on() and tasks.is_left()
    assert sorted(task.case for task in rest(tasks, 0)) == CASES[2:]
    assert not tasks.go_on()


def test_places_that_compile_go_through_neighbours_and_take_half_of_what_another_has_left() -> None:
    later = [Judge("B", f"lse:q=[{number}]") for number in range(1, 9)]
    tasks = Tasks((), [[task] for task in later])
    assert tasks.go_on()
    taken = [tasks.take(place) for place in (0, 1, 0, 1, 2, 0, 1, 2, 0)]
    assert taken == [*(later[number] for number in (0, 4, 1, 5, 3, 2, 6, 7)), None]


@pytest.mark.usefixtures("_few")
def test_what_is_too_large_for_one_that_is_ahead_waits_for_the_end() -> None:
    now, later = [Judge("A", CASES[0])], [Judge("B", CASES[1])]
    tasks = Tasks([now], [later])
    tasks.ahead = 1
    assert tasks.take(1, 10) == later[0]
    tasks.defer(1, later[0], 20)
    assert [tasks.take(0, 20), tasks.take(0, 20), tasks.is_left()] == [now[0], None, False]
    assert tasks.go_on() and tasks.take(0, 20) == later[0]


def test_what_is_too_large_waits_until_a_place_has_room_for_it() -> None:
    first, second, third = (Judge("A", case) for case in CASES[:3])
    tasks = Tasks([[first, second], [third]])
    assert tasks.take(0, 10) == first
    tasks.defer(0, first, 20)
    assert tasks.take(0, 10) == third and tasks.take(0, 10) is None and tasks.is_left()
    assert [tasks.take(1, 20), tasks.taken[1], tasks.take(1, 10)] == [first, 20, second]
    assert tasks.take(1, 10) is None and tasks.taken[1] == 0 and not tasks.is_left()


@pytest.mark.usefixtures("_few")
def test_what_is_set_apart_is_taken_neither_now_nor_ahead() -> None:
    first, second = [Judge("A", CASES[0]), Judge("B", CASES[0])], [Judge("B", CASES[1])]
    tasks = Tasks([first, second], [[Judge("C", case)] for case in CASES[1:3]])
    tasks.ahead = 3
    chosen = (*first[1:], *second, Judge("C", CASES[1]))
    assert tasks.set_apart(lambda task: task in chosen) == [first[1:], second]
    assert tasks.take(3) == Judge("C", CASES[2])
    assert [tasks.take(3), tasks.take(3)] == [first[0], None]
    assert tasks.go_on() and tasks.take(0) == Judge("C", CASES[1])


def test_a_call_that_is_given_up_leaves_the_others() -> None:
    chunk = "context_chunk:dims=small;q=[1];kv=[5]"
    tasks = Tasks(
        [[Judge("A", CASES[0]), Judge("B", CASES[0])], [Judge("A", chunk), Explore("A", 1, 0, ("combinations",))]]
    )
    tasks.dropped.add(("A", call_of(CASES[0])))
    taken = [task for _ in range(4) if (task := tasks.take(0))]
    assert [(task.reference, type(task)) for task in taken] == [("B", Judge), ("A", Judge), ("A", Explore)]
