"""Each data regime keeps its promise on the inputs it makes, and what SPEC says of hazards and clauses is so."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case, Layout
from mla_conformance.files.whole import section_of
from mla_conformance.judging.golden import golden_attention
from mla_conformance.judging.record import CLAUSES
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.operands import REGIMES, segments
from mla_conformance.roles.compress import problem as compress
from mla_conformance.roles.compress.case import VALUES as STATES
from mla_conformance.roles.definition import build_problem
from mla_conformance.roles.prepare import problem as prepare
from mla_conformance.roles.prepare.case import VALUES
from mla_conformance.roles.topk import problem as topk
from mla_conformance.roles.topk.case import LOGITS
from mla_conformance.tests.reports import script
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CPU = torch.device("cpu")


def built(data: str, **fields: Any) -> Problem:
    given = {"capability": "context_chunk", "dims": "small", "heads": 3, "q": (5,), "kv": (128,), "dtype": "fp32"}
    return build_problem(Case.of(**{**given, "data": data, **fields}), CPU)


def logits(problem: Problem, request: int = 0, raw: bool = False) -> torch.Tensor:
    """[N, T, S] logits of one request, scaled unless raw; masked for new tokens."""
    (call,) = problem.calls
    rows = list(segments(problem.query_start_loc))[request]
    keys = list(segments(call.key_start_loc))[request]
    scores = torch.einsum("tnd,snd->nts", call.q[rows].double(), call.k[keys].double())
    if problem.case.call != Call.CONTEXT_CHUNK:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores if raw else scores * problem.case.softmax_scale


@pytest.mark.parametrize(("dtype", "length"), [("bf16", 129), ("fp16", 300)])
def test_a_needle_dominates_an_edge_that_moves_with_row_and_head(dtype: str, length: int) -> None:
    weights = logits(built("needle", dims="r1", kv=(length,), heads=6, dtype=dtype)).softmax(-1)
    largest, position = weights.max(-1)
    assert 0.9 < float(largest.median()) < 0.99, "others keep some weight"
    assert torch.equal(position[:-1, 1:], position[1:, :-1]) or length < 256, "the next head is like the next row"
    assert [position[head, 0].item() for head in range(4)] == [length - 1, length - 1, 0, 15]


@pytest.mark.parametrize(("data", "length"), [("hot_tail", 300), ("hot_ones", 4000)])
def test_a_hot_key_holds_about_half_of_the_mass_over_a_diffuse_tail(data: str, length: int) -> None:
    weights = logits(built(data, dims="r1", kv=(length,), q=(32,))).softmax(-1)
    hottest = weights.amax(-1)
    assert 0.3 < float(hottest.median()) < 0.7
    rest = weights.sort(-1).values[..., :-1]
    assert float(rest.amax(-1).median()) < 0.05


@pytest.mark.parametrize(("data", "low", "high"), [("negative", -1.7e5, -1.5e5), ("shifted", 1.5e5, 1.7e5)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_shifted_regimes_move_every_raw_score(data: str, low: float, high: float, dtype: str) -> None:
    scores = logits(built(data, dtype=dtype), raw=True)
    assert low < float(scores.min()) and float(scores.max()) < high
    assert bool((scores.std(-1) > 0.5).all()), "a constant on top of what there was"


@pytest.mark.parametrize("data", ["ones", "hot_ones", "rising_ones"])
def test_values_of_one_give_an_output_of_one(data: str) -> None:
    problem = built(data, q=(3,), kv=(300,))
    assert bool((problem.attention[0].v == 1).all())
    assert torch.allclose(golden_attention(problem).calls[0].output, torch.ones(()).double(), rtol=1e-12)


def test_every_regime_is_promised_and_used() -> None:
    own = {Role.TOPK: (LOGITS, topk), Role.PREPARE: (VALUES, prepare), Role.COMPRESS: (STATES, compress)}
    used: dict[Role | None, set[str]] = {}
    for case in (case for capability in CAPABILITIES.values() for case in capability.cases):
        used.setdefault(case.role if case.role in own else None, set()).update(case.regimes)
    assert used.pop(None) == set(REGIMES)
    assert used == {role: set(promised) for role, (promised, _) in own.items()}
    assert used == {role: set(problem.KINDS) for role, (_, problem) in own.items()}
    assert all(regime.sentence for regime in REGIMES.values())


@pytest.mark.parametrize(("kind", "said"), [("nan", torch.isnan), ("inf", torch.isposinf), ("large", 1e4)])
def test_excluded_bytes_hold_the_poison_of_the_case(kind: str, said: Any) -> None:
    problem = built("normal", pad=3, poison=kind, layout=Layout.SLICED, dtype="bf16")
    (call,) = problem.calls
    for name in ("q", "k"):
        tensor = getattr(call, name)
        columns = storage_bytes(tensor).view(tensor.dtype).view(-1, tensor.stride(1))
        poisoned = torch.cat([tensor[-3:].flatten(), columns[:, :16].flatten(), columns[:, -16:].flatten()])
        held = said(poisoned) if callable(said) else poisoned == torch.tensor(said).to(tensor.dtype)
        assert bool(held.all()), name


SPEC = Path(str(files("mla_conformance") / "SPEC.md"))
HEADINGS = re.findall(r"^### (\d+\.\d+) \S", SPEC.read_text(encoding="utf-8"), flags=re.MULTILINE)
ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("reference", "backends", "conformance") for path in (ROOT / folder).rglob("*.py")]


def test_the_spec_says_what_cases_and_requirements_are_and_has_each_clause_that_is_named() -> None:
    spec, renew = script("spec"), "run `python ci/spec.py`"
    assert section_of(SPEC, "hazards")[1].strip() == "\n".join(spec.section_lines()), renew
    written = "\n".join(spec.requirement_lines(SPEC.read_text("utf-8")))
    assert section_of(SPEC, "requirements")[1].strip() == written, renew
    assert [line for line in written.splitlines() if line.endswith("| 0 |") and "excluded: " not in line] == []
    assert {*(entry.clause for entry in CAPABILITIES.values()), *CLAUSES.values()} <= set(HEADINGS)
    cited = {clause for path in SOURCES for clause in re.findall(r"SPEC (\d+\.\d+)", path.read_text(encoding="utf-8"))}
    assert cited <= set(HEADINGS)
