"""Each data regime keeps its promise on the inputs it makes, and every hazard of SPEC section 5 has a generator."""

import importlib.util
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case, Layout
from mla_conformance.files.outputs import Section
from mla_conformance.judging.golden import golden_attention
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.operands import segments
from mla_conformance.problems.problem import Problem
from mla_conformance.problems.regimes import REGIMES
from mla_conformance.reference.attention import attention
from mla_conformance.roles.compress import problem as compress
from mla_conformance.roles.compress.case import VALUES as STATES
from mla_conformance.roles.prepare import problem as prepare
from mla_conformance.roles.prepare.case import VALUES
from mla_conformance.roles.table import build_problem
from mla_conformance.roles.topk import problem as topk
from mla_conformance.roles.topk.case import LOGITS
from mla_conformance.trials.transform import overwrite, regroup, scale_values
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CPU = torch.device("cpu")
found = importlib.util.spec_from_file_location("ci_spec", Path(__file__).parents[2] / "ci" / "spec.py")
assert found is not None and found.loader is not None
spec = importlib.util.module_from_spec(found)
sys.modules[found.name] = spec  # where its data classes are looked up
found.loader.exec_module(spec)


def built(data: str, **fields: Any) -> Problem:
    """One request with 128 keys, unmasked, unless the fields say otherwise."""
    given = {"capability": "context_chunk", "dims": "small", "heads": 3, "q": (5,), "kv": (128,), "dtype": "fp32"}
    return build_problem(Case.of(**{**given, "data": data, **fields}), CPU)


def logits(problem: Problem, request: int = 0, raw: bool = False) -> torch.Tensor:
    """[N, T, S] logits of one request, scaled unless raw; masked for new tokens."""
    (call,) = problem.calls
    rows = list(segments(problem.query_start_loc))[request]
    keys = list(segments(call.key_start_loc))[request]
    scores = torch.einsum("tnd,snd->nts", call.q[rows].double(), call.k[keys].double())
    if problem.case.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores if raw else scores * problem.case.softmax_scale


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("length", [129, 300])
def test_a_needle_dominates_an_edge_that_moves_with_row_and_head(dtype: str, length: int) -> None:
    weights = logits(built("needle", dims="r1", kv=(length,), heads=6, dtype=dtype)).softmax(-1)
    largest, position = weights.max(-1)
    assert 0.9 < float(largest.median()) < 0.99, "others keep some weight"
    assert torch.equal(position[:-1, 1:], position[1:, :-1]) or length < 256, "the next head is like the next row"
    assert [position[head, 0].item() for head in range(4)] == [length - 1, length - 1, 0, 15]


def test_a_needle_under_a_causal_mask_is_a_key_that_the_row_sees() -> None:
    problem = built("needle", capability="new_tokens", dims="r1", q=(64,), kv=(), heads=4)
    largest, position = logits(problem).softmax(-1).max(-1)
    assert float(largest[:, 16:].median()) > 0.9
    assert position[:3, -5:-3].tolist() == [[16, 48], [48, 32], [32, 21]]


def test_needles_of_a_chunked_case_sit_at_pages_and_chunks() -> None:
    case = Case.of(capability="chunked_context", heads=6, q=(4,), kv=(200,), workspace=64, data="needle")
    problem = build_problem(case, CPU)
    new, *chunks = problem.calls
    k = torch.cat([*(chunk.k for chunk in chunks), new.k]).double()
    weights = torch.einsum("nd,snd->ns", new.q[-1].double(), k).mul(case.softmax_scale).softmax(-1)
    assert weights.argmax(-1).tolist() == [15, 16, 63, 64, 192, 128]
    assert bool((weights.amax(-1) > 0.5).all())


@pytest.mark.parametrize("data", ["hot_tail", "hot_ones"])
@pytest.mark.parametrize("length", [300, 4000])
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


@pytest.mark.parametrize("data", ["rising", "rising_ones"])
def test_rising_logits_raise_the_running_maximum_in_every_tile(data: str) -> None:
    tiles = logits(built(data, kv=(1024,))).unflatten(-1, (8, 128)).amax(-1)
    assert bool((tiles.diff(dim=-1) > 0).float().mean() > 0.95)
    assert float((tiles[..., -1] - tiles[..., 0]).median()) > 10


@pytest.mark.parametrize("data", ["ones", "hot_ones", "rising_ones"])
def test_values_of_one_give_an_output_of_one(data: str) -> None:
    problem = built(data, q=(3,), kv=(300,))
    assert bool((problem.attention[0].v == 1).all())
    assert torch.allclose(golden_attention(problem).calls[0].output, torch.ones(()).double(), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_integers_are_exact_in_every_dtype_and_sparse(dtype: str) -> None:
    (call,) = built("integers", dtype="fp32").calls
    (narrow,) = built("integers", dtype=dtype).calls
    for name in ("q", "k", "v"):
        x = getattr(call, name)
        assert torch.equal(getattr(narrow, name).float(), x) and set(x.unique().tolist()) == {-2, -1, 0, 1, 2}
        assert 0.6 < float((x == 0).float().mean()) < 0.9


def test_outliers_have_an_offset_and_large_channels() -> None:
    (call,) = built("outliers", kv=(600,)).attention
    for x in (call.k, call.v):
        assert float(x.mean()) > 0.3
        spread = x.std(0).mean(0)
        large = torch.arange(x.shape[-1]) % 16 == 3
        assert float(spread[large].min()) > 8 > 2 > float(spread[~large].max())


def test_low_rank_rows_point_along_one_direction_per_head() -> None:
    (call,) = built("low_rank", kv=(100,)).calls
    for head in range(3):
        values = torch.linalg.svdvals(call.k[:, head].double())
        assert float(values[0].square() / values.square().sum()) > 0.98


@pytest.mark.parametrize(("data", "factor"), [("large_logits", 8), ("huge_logits", 64), ("extreme_logits", 100)])
def test_scaled_logits_are_the_normal_ones_times_a_factor(data: str, factor: float) -> None:
    assert torch.allclose(logits(built(data)), factor * logits(built("normal")), rtol=1e-6, atol=1e-4)


def test_tiny_values_are_a_thousandth_and_zero_keys_make_all_logits_equal() -> None:
    assert torch.equal(built("tiny_values").attention[0].v, built("normal").attention[0].v * 1e-3)
    problem = built("zero_keys")
    assert not logits(problem).any()
    mean = problem.attention[0].v.double().mean(0).expand_as(golden_attention(problem).calls[0].output)
    assert torch.allclose(golden_attention(problem).calls[0].output, mean, rtol=1e-12)


def test_every_regime_is_promised_and_used() -> None:
    cases = [case for capability in CAPABILITIES.values() for case in capability.cases]
    assert {case.data for case in cases if case.role not in (Role.TOPK, Role.PREPARE, Role.COMPRESS)} == set(REGIMES)
    assert {case.data for case in cases if case.role is Role.TOPK} == set(LOGITS) == set(topk.KINDS)
    assert {case.data for case in cases if case.role is Role.PREPARE} == set(VALUES) == set(prepare.KINDS)
    assert {case.data for case in cases if case.role is Role.COMPRESS} == set(STATES) == set(compress.KINDS)
    assert all(regime.sentence for regime in REGIMES.values())


@pytest.mark.parametrize("dims", ["small", "r1", "glm"])
def test_odd_strides_are_odd(dims: str) -> None:
    (call,) = built("normal", layout=Layout.ODD, dims=dims, dtype="bf16").attention
    for x in (call.q, call.k, call.v):
        assert x.stride(1) % 2 == 1 and x.stride(1) > x.shape[-1] and x.storage_offset() == 1


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


LAWFUL = ["new_tokens:dims=small;heads=3;q=[9,1,20]", "context_chunk:dims=small;heads=3;q=[9,1,2];kv=[40,0,7]"]


def fresh(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The golden state of the only call, computed beside every cache."""
    (call,) = problem.attention
    state = attention(
        call.q,
        call.k,
        call.v,
        query_start_loc=problem.query_start_loc,
        key_start_loc=call.key_start_loc,
        scale=problem.case.softmax_scale,
        causal=problem.case.is_causal,
    )
    return state.output, state.lse


def same_as_fresh(problem: Problem) -> bool:
    state = golden_attention(problem).calls[0]
    output, lse = fresh(problem)
    return torch.equal(state.output, output) and torch.equal(state.lse, lse)


@pytest.mark.parametrize("text", LAWFUL)
def test_a_transformed_problem_has_its_own_golden_result(text: str) -> None:
    problem = build_problem(Case.parse(text), CPU)
    changed = [
        regroup(problem, [2, 0]),
        regroup(problem, [0, 2]),
        regroup(problem, [0, 1, 2], 4),
        scale_values(problem, 0.25),
        scale_values(problem, -2.0),
    ]
    assert same_as_fresh(problem) and all(map(same_as_fresh, changed))
    assert len({problem.key, *(other.key for other in changed)}) == 6


@pytest.mark.parametrize("text", LAWFUL)
def test_regrouping_keeps_each_request_what_it_was(text: str) -> None:
    problem = build_problem(Case.parse(text), CPU)
    whole, turned = fresh(problem), fresh(regroup(problem, [2, 1, 0]))
    requests = list(segments(problem.query_start_loc))
    order = torch.cat([torch.arange(s.start, s.stop) for s in reversed(requests)])
    assert torch.allclose(turned[0], whole[0][order], rtol=1e-12) and torch.allclose(turned[1], whole[1][:, order])


def test_a_prefix_of_new_tokens_cuts_queries_and_keys() -> None:
    problem = build_problem(Case.parse(LAWFUL[0]), CPU)
    cut = regroup(problem, [0, 1, 2], 4)
    assert cut.query_start_loc == cut.calls[0].key_start_loc == (0, 4, 5, 9)
    kept = torch.tensor([0, 1, 2, 3, 9, 10, 11, 12, 13])
    assert torch.allclose(fresh(cut)[0], fresh(problem)[0][kept], rtol=1e-12)


@pytest.mark.parametrize("text", LAWFUL)
def test_overwritten_tensors_keep_their_addresses_and_take_the_other_golden_result(text: str) -> None:
    case = Case.parse(text)
    problem, other = build_problem(case, CPU), build_problem(replace(case, seed=9), CPU)
    before = golden_attention(problem).calls[0].output
    addresses = [tensor.data_ptr() for tensor in operands(problem.attention[0])]
    written = overwrite(problem, other)
    assert [tensor.data_ptr() for tensor in operands(written.attention[0])] == addresses
    assert same_as_fresh(written) and not torch.equal(golden_attention(written).calls[0].output, before)


def operands(call: AttentionCall) -> tuple[torch.Tensor, ...]:
    return call.q, call.k, call.v


def test_the_spec_says_of_hazards_what_the_cases_are() -> None:
    written = Section.of(Path(str(files("mla_conformance") / "SPEC.md")), "hazards").content.strip()
    assert written == "\n".join(spec.section_lines()), "run `python ci/spec.py`"
