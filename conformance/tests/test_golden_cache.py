"""Golden states are computed once, and kept in memory up to a bound."""

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging import golden_cache
from mla_conformance.judging.golden_cache import GoldenCache, States
from mla_conformance.problems.kept import Kept
from mla_conformance.problems.problem import Problem, build_problem
from mla_conformance.reference.attention import AttentionState, ErrorTerms

CPU = torch.device("cpu")


def problem(seed: int, case: str = "new_tokens:dims=small;heads=2;q=[5]") -> Problem:
    return build_problem(Case.parse(f"{case};seed={seed}"), CPU)


def states(value: float) -> States:
    rows, lse = torch.full((100, 2, 16), value), torch.full((2, 100), value)
    terms = ErrorTerms(rows.clone(), rows.clone(), rows.clone(), rows.clone(), lse.clone())
    return (AttentionState(rows, lse, terms),), None


class Counted:
    """A computation that counts how often it is carried out."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> States:
        self.times += 1
        return states(float(self.times))


def test_a_state_is_computed_once() -> None:
    cache, compute = GoldenCache(), Counted()
    assert cache.get(problem(1), compute) is cache.get(problem(1), compute)
    cache.get(problem(2), compute)
    assert compute.times == 2


def test_the_oldest_states_go_when_the_bound_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_cache, "KEPT_BYTES", {"cpu": 150_000})  # two of 65,600 bytes each
    cache, compute = GoldenCache(), Counted()
    for seed in (1, 2, 1, 3, 1, 2):
        cache.get(problem(seed), compute)
    assert compute.times == 4  # 2 was used longest ago when 3 came


def test_the_last_state_is_kept_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_cache, "KEPT_BYTES", {"cpu": 1})
    cache, compute = GoldenCache(), Counted()
    for seed in (1, 1, 2, 2):
        cache.get(problem(seed), compute)
    assert compute.times == 2


def test_a_value_that_comes_again_counts_once() -> None:
    kept = Kept[str]()
    for value in ("first", "again"):
        kept.keep("one", value, size=60, limit=100)
    kept.keep("two", "beside", size=40, limit=100)
    assert (kept.find("one"), kept.find("two")) == ("again", "beside")
    kept.forget()
    kept.keep("three", "alone", size=100, limit=100)
    assert (kept.find("one"), kept.find("three")) == (None, "alone")
