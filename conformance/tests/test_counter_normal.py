"""Numbers from counters: normal, independent, and the same whatever they are made in."""

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.problems import operands
from mla_conformance.problems.operands import fill_normal
from mla_conformance.roles.prefill import problem as prefill
from mla_conformance.roles.table import build_problem


def test_numbers_are_those_of_a_normal_distribution_and_independent() -> None:
    x, y = (fill_normal(torch.empty(2**20, dtype=torch.float64), seed) for seed in (1, 2))
    assert abs(float(x.mean())) < 5e-3 and abs(float(x.var()) - 1) < 5e-3
    assert abs(float(x.pow(4).mean()) - 3) < 0.2 and float(x.abs().max()) < 5
    for lag in (1, 2, 64, 128, 2**15):
        assert abs(float((x[lag:] * x[:-lag]).mean())) < 5e-3
    assert abs(float((x * y).mean())) < 5e-3


def test_chunks_do_not_show_and_the_first_numbers_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill_normal(torch.empty(10, 100, dtype=torch.bfloat16), 7)
    monkeypatch.setitem(operands._CHUNK, "cpu", 77)
    assert torch.equal(fill_normal(torch.empty(10, 100, dtype=torch.bfloat16), 7), whole)
    units = fill_normal(torch.empty(4, dtype=torch.float64), 3) * 209.0  # sums of eight bytes, centred
    assert units.round().int().tolist() == [349, -46, -1, 66]


def test_large_keys_are_drawn_by_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_COUNTED_ELEMENTS", 1000)
    case = Case.parse("context_chunk:dims=small;heads=2;q=[3];kv=[200];data=needle")
    first, second = (build_problem(case, torch.device("cpu")).attention[0] for _ in range(2))
    assert torch.equal(first.k, second.k) and torch.equal(first.q, second.q)
    assert 0.9 < float(first.k.double().var()) < 1.1 and not torch.equal(first.k[..., :16], first.v)
