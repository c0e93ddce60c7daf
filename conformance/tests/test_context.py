"""What a process keeps: made once for all backends, within so many bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.problem import Problem
from mla_conformance.trials import context as kept
from mla_conformance.trials.context import BoundedCache, Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

CASE = Case.parse("new_tokens:dims=small;heads=2;q=[5,9]")
CPU = torch.device("cpu")
WRONG = """
from mla_conformance.backends.eager import EagerPrefillBackend

class AddsOne(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *arguments, **options):
        output, lse = super().run_prefill_new_tokens(*arguments, **options)
        return output + 1, lse

class SpoilsItsInputs(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, *arguments, **options):
        returned = super().run_prefill_new_tokens(q, k, v, *arguments, **options)
        for tensor in (q, k, v):
            tensor.fill_(1.0)
        return returned
"""


class Made:
    """Everything that contexts of a test build and compute, which is what they keep."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.golden: list[GoldenAttention] = []

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.problems), len(self.golden)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()

    def noting(notes: list[Any], make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            notes.append(make(*arguments))
            return notes[-1]

        return noted

    monkeypatch.setattr(kept, "build_problem", noting(made.problems, kept.build_problem))
    monkeypatch.setattr(kept, "golden_of", noting(made.golden, kept.golden_of))
    return made


@pytest.fixture
def wrong(tmp_path: Any) -> Callable[[str], str]:
    (tmp_path / "wrong.py").write_text(WRONG)
    return lambda name: f"{tmp_path}/wrong.py:{name}"


def judged(context: Context, reference: str = "EAGER", started: Callable[[Case], None] = lambda case: None) -> Record:
    return judge_one(Subject.of(reference, CPU), CASE, context, started)


def test_inputs_and_golden_result_are_made_once_for_two_backends(made: Made) -> None:
    context = Context()
    assert [judged(context, name).status for name in ("EAGER", "TORCH_SDPA", "EAGER")] == [Status.PASS] * 3
    assert made.counts == (1, 1)
    assert judged(Context()).status is Status.PASS and made.counts == (2, 2)


def test_what_a_backend_writes_into_its_inputs_no_other_sees(made: Made, wrong: Callable[[str], str]) -> None:
    context = Context()
    assert judged(context, wrong("SpoilsItsInputs")).check == Check.MUTATED_INPUT
    assert judged(context).status is Status.PASS
    assert made.counts == (1, 1)


def test_a_wrong_backend_is_tried_once(made: Made, wrong: Callable[[str], str]) -> None:
    context, attempts = Context(), list[Case]()
    judged(context)
    record = judged(context, wrong("AddsOne"), attempts.append)
    assert (record.status, record.check) == (Status.FAIL, Check.OUTPUT)
    assert len(attempts) == 1 and made.counts == (1, 1)


def test_inputs_above_the_limit_are_built_for_each_backend(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "PROBLEM_BYTES", {"cpu": 100})
    context = Context()
    assert [judged(context).status for _ in range(2)] == [Status.PASS] * 2
    assert made.counts == (2, 1)


def values_of(values: BoundedCache[str]) -> list[str]:
    return [value for value, _ in values._entries.values()]


def keep(values: BoundedCache[str], name: str, elements: int, limit: int = 100) -> torch.Tensor:
    tensor = torch.zeros(elements, dtype=torch.uint8)
    values.keep((name, "cpu"), name, [tensor], limit)
    return tensor


def test_what_was_used_longest_ago_makes_room() -> None:
    values = BoundedCache[str]()
    for name in "abc":
        keep(values, name, 30)
    assert values.find(("a", "cpu")) == "a"
    keep(values, "d", 30)
    assert values_of(values) == ["c", "a", "d"] and values.find(("b", "cpu")) is None


def test_the_last_one_is_kept_whatever_its_size() -> None:
    values = BoundedCache[str]()
    keep(values, "a", 30)
    keep(values, "b", 300)
    assert values_of(values) == ["b"]
    keep(values, "c", 30)
    assert values_of(values) == ["c"]


def test_memory_that_tensors_share_counts_once() -> None:
    values, shared = BoundedCache[str](), torch.zeros(60, dtype=torch.uint8)
    values.keep(("a", "cpu"), "a", [shared[:30], shared[30:]], 100)
    keep(values, "b", 40)
    assert values_of(values) == ["a", "b"]
