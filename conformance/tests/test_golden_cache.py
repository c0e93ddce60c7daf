"""Golden states are computed once: kept in memory up to a bound, and on disk where a folder is named."""

from pathlib import Path

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging import golden_cache
from mla_conformance.judging.golden import expect
from mla_conformance.judging.golden_cache import FOLDER_VARIABLE, GoldenCache, States
from mla_conformance.problems.build import build_problem
from mla_conformance.problems.kept import Kept
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import AttentionState, ErrorTerms

CPU = torch.device("cpu")


def problem(seed: int, case: str = "new_tokens:dims=small;heads=2;q=[5]") -> Problem:
    return build_problem(Case.parse(f"{case};seed={seed}"), CPU)


def states(value: float, merged: bool = False) -> States:
    rows, lse = torch.full((100, 2, 16), value), torch.full((2, 100), value)
    terms = ErrorTerms(rows.clone(), rows.clone(), rows.clone(), rows.clone(), lse.clone())
    state = AttentionState(rows, lse, terms)
    return (state,), state if merged else None


class Counted:
    """A computation that counts how often it is carried out."""

    def __init__(self, merged: bool = False) -> None:
        self.times, self.merged = 0, merged

    def __call__(self) -> States:
        self.times += 1
        return states(float(self.times), self.merged)


def forget(_: Problem) -> States:
    raise AssertionError("expected the states to be found")


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


@pytest.mark.parametrize("merged", [True, False])
def test_a_folder_serves_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: bool) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "new"))
    compute = Counted(merged)
    (first,), whole = GoldenCache().get(problem(1), compute)
    (again,), whole_again = GoldenCache().get(problem(1), compute)
    assert compute.times == 1 and (whole is None) == (whole_again is None) == (not merged)
    assert first is not again and torch.equal(first.output, again.output) and torch.equal(first.lse, again.lse)
    assert again.terms and first.terms and torch.equal(again.terms.peak, first.terms.peak)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".pt"]


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_damaged_file_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    compute = Counted()
    GoldenCache().get(problem(1), compute)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    for _ in range(2):
        GoldenCache().get(problem(1), compute)
    assert compute.times == 2


def test_a_changed_source_meets_no_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    compute = Counted()
    GoldenCache().get(problem(1), compute)
    monkeypatch.setattr(golden_cache, "_source_digest", lambda: "another")
    GoldenCache().get(problem(1), compute)
    assert compute.times == 2


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "folder"))
    assert GoldenCache().get(problem(1), Counted())[0]


def test_real_states_go_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    made = problem(77, "chunked_context:dims=small;heads=2;q=[5];kv=[40]")
    expected = expect(made)
    calls, merged = GoldenCache().get(made, lambda: forget(made))
    assert merged and expected.merged and torch.equal(merged.output, expected.merged.output)
    assert len(calls) == len(expected.calls)


def test_a_value_that_comes_again_counts_once() -> None:
    kept = Kept[str]()
    for value in ("first", "again"):
        kept.keep("one", value, size=60, limit=100)
    kept.keep("two", "beside", size=40, limit=100)
    assert (kept.find("one"), kept.find("two")) == ("again", "beside")
    kept.forget()
    kept.keep("three", "alone", size=100, limit=100)
    assert (kept.find("one"), kept.find("three")) == (None, "alone")
