"""The order in which several backends are judged."""

from mla_conformance.engine.messages import Explore, Judge
from mla_conformance.engine.tasks import Tasks, rounds_of

PREFILL = ["lse:q=[4]", "lse:q=[5]"]
DECODE = ["decode:q=[2];kv=[63]"]
LAYER = ["mixed_batch:call=layer;q=[2];kv=[9]", "mixed_batch:call=layer;q=[3];kv=[9]"]


def group(case: str, *references: str) -> list[Judge]:
    return [Judge(reference, case) for reference in references]


def test_what_completes_most_backends_comes_first() -> None:
    layers = [group(case, "All") for case in LAYER]
    decode = [group(case, "Decode", "All") for case in DECODE]
    prefill = [group(case, "P1", "P2", "P3", "All") for case in PREFILL]
    assert rounds_of([*layers, *decode, *prefill]) == [prefill, decode, layers]


def test_one_backend_is_judged_in_the_order_of_its_cases() -> None:
    groups = [group(case, "All") for case in (*LAYER, *PREFILL, *DECODE)]
    assert rounds_of(groups) == [groups]
    assert rounds_of([]) == []


def test_backends_that_are_complete_sooner_together_are_judged_together() -> None:
    cases, drawn = [group(case, "P", "All") for case in PREFILL], [Explore("All", 1, 0, ("combinations",))]
    assert rounds_of([*cases, drawn]) == [[*cases, drawn]]


def test_no_round_begins_before_the_last_is_done() -> None:
    first, second = group(PREFILL[0], "P"), group(DECODE[0], "D")
    tasks = Tasks([first], [group(LAYER[0], "Compiles")], [[second]])
    assert (tasks.take(0), tasks.take(0)) == (first[0], None)
    assert tasks.go_on() and tasks.take(0) == second[0]
    assert tasks.go_on() and tasks.take(0) == Judge("Compiles", LAYER[0])
    assert not tasks.go_on()
