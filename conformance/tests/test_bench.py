"""The benchmark's parts: formulas agree, times are of the work, and the split adds up."""

import re
from types import SimpleNamespace

import pytest
import torch

from mla_conformance.backends.roles import Role
from mla_conformance.bench import fences, suite, timing
from mla_conformance.bench.timing import Timing, timed
from mla_conformance.cli import main
from mla_conformance.engine.request import RunRequest
from mla_conformance.reference.attention import AttentionState
from mla_conformance.tests.bench import formulas, golden
from mla_conformance.tests.bench.formulas import (
    FORMULAS,
    SPARSE_FORMULAS,
    Operands,
    Shape,
    SparseOperands,
    SparseShape,
    materialised,
    plain,
)
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CPU = torch.device("cpu")


def test_the_formulas_compute_the_same() -> None:
    operands = Operands.of(Shape(2, 33, 70), CPU)
    expected = plain(operands)
    assert isinstance(expected, AttentionState)
    found = FORMULAS["golden"](operands)
    assert isinstance(found, AttentionState)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-12, atol=1e-13)
    output, lse = materialised(operands)
    torch.testing.assert_close(output.double(), expected.output, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-4, atol=1e-4)


def test_the_sparse_formulas_compute_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "WORKSPACE_ELEMENTS", 4 * 3 * 20)
    operands = SparseOperands.of(SparseShape(3, 7, 20), CPU)
    assert all(len(set(row.tolist())) == 10 for row in operands.selected)
    expected, found = (formula(operands) for formula in SPARSE_FORMULAS.values())
    for a, b in zip(golden._tensors(expected), golden._tensors(found), strict=True):
        b = b.view(7, 3).mT if b.dim() == 2 else b.view(7, 3, -1)
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-13)


def test_useful_operations_count_visible_pairs() -> None:
    assert Shape(2, 3, 5).operations == 2 * (192 + 128) * 2 * (3 + 4 + 5)
    assert SparseShape(2, 3, 10).operations == 2 * (576 + 512) * 2 * 3 * 5


def test_a_time_is_the_median_of_the_repetitions_after_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lengths = [0.0], iter([20.0, 3.0, 1.0, 2.0])

    def work() -> None:
        clock[0] += next(lengths)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert timed(work, CPU, 3) == Timing(2.0, 1.0, 3.0)
    assert str(Timing(1.0, 0.5, 2.0)) == "1 s (0.5 to 2)"


def test_a_comparison_names_every_formula_with_its_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "_SHAPES", {"cpu": (Shape(2, 16, 16),)})
    monkeypatch.setattr(golden, "_process", lambda device, *what: golden._measure(torch.device(device), *what))
    head, *lines = golden.compare("cpu")
    assert head == "2 heads, 16 queries, 16 keys, causal:"
    assert [line.split()[0] for line in lines] == list(FORMULAS)
    assert all("× the time of" in line for line in lines)


def test_the_sparse_comparison_has_the_ratio_of_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden, "_SPARSE", {"cpu": SparseShape(2, 4, 16)})
    monkeypatch.setattr(golden, "_process", lambda device, *what: golden._measure(torch.device(device), *what))
    assert main(["bench", "--sparse", "--device", "cpu"]) == 0
    _, head, sparse, masked = capsys.readouterr().out.splitlines()
    assert head == "2 heads, 4 queries, 8 of 16 keys selected:"
    assert sparse.startswith("  sparse ") and sparse.endswith("× the time of masked")
    assert masked.startswith("  masked ") and masked.endswith("× the time of sparse")


def test_a_measurement_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "_SCALES", {"cpu": [Shape(2, -1, 16)]})
    _, line = golden.scale("cpu")
    assert "Error" in line


def test_the_split_adds_up() -> None:
    (line,) = suite.split(RunRequest.of(["EAGER"], ["new_tokens"], "smoke", "cpu"), CPU)
    shares = [int(share) for share in re.findall(r"\((-?\d+)%\)", line)]
    assert len(shares) == 5 and 97 <= sum(shares) <= 103
    assert f"{len(CAPABILITIES['new_tokens'].smoke)} cases" in line


def test_named_cases_are_measured_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["new_tokens:dims=small;q=[5]", "lse:dims=small;q=[300]"]
    named = [word for case in cases for word in ("--case", case)]
    assert main(["bench", "--suite", "EAGER", "--device", "cpu", *named]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    for case, line in zip(cases, lines, strict=True):
        reported = re.fullmatch(r"EAGER, (.*): ([\d.]+) s: .*golden ([\d.]+) s .*", line)
        assert reported and reported[1] == case and float(reported[3]) <= float(reported[2])


def test_fences_are_measured_beside_the_same_calls_without_them() -> None:
    cases = [case for case in CAPABILITIES[fences.CAPABILITY].cases if case.role in (Role.PREFILL, Role.DECODE)]
    (line,) = fences.cost(Subject.of("mla_conformance.backends.eager:EagerPrefillBackend", CPU), cases[:2])
    reported = re.fullmatch(
        r".*, (\d+) cases? with .*: ([\d.]+) s, ([\d.]+) times .* alone ([\d.]+) s, ([\d.]+) times", line
    )
    assert reported and int(reported[1]) == 2 and float(reported[4]) <= float(reported[2]) and float(reported[5]) > 0
    reader = "mla_conformance.defects.bounds:ElementBehindQ"
    assert [": fail, not measured" in line for line in fences.cost(Subject.of(reader, CPU), cases[:1])] == [True]


def test_the_workspace_leaves_out_operands_and_results() -> None:
    result = AttentionState(torch.zeros(4, 2, 8, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64))
    assert sorted(x.shape for x in golden._tensors((result, torch.zeros(3)))) == [(2, 4), (3,), (4, 2, 8)]


def test_the_command_prints_where_it_runs_and_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden, "_SCALES", {"cpu": [Shape(1, 8, 8)]})
    assert main(["bench", "--scale", "--device", "cpu"]) == 0
    where, table, *_ = capsys.readouterr().out.splitlines()
    assert where.startswith(f"device cpu · torch {torch.__version__}")
    assert table.split()[:3] == ["heads", "keys", "rows"]
