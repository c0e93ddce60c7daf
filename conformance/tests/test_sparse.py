"""Sparse problems are what their cases say; wrong sparse kernels are known defects."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.latent_entries import dequantise, gather
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.judging.golden import golden_attention
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import merge_states
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse.call import SparseCall
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.lists import half_lists, lonely_row, reversed_lists, widened_lists
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.transform import regroup

CPU = torch.device("cpu")
CONTEXT = Context()
SMALL: dict[str, Any] = {"dims": "small", "heads": 2, "page": 4, "topk": 8, "dtype": "fp32"}


def case(**fields: Any) -> Case:
    given = {"capability": "sparse_decode", "q": (2, 1, 3), "kv": (20, 0, 5), **SMALL}
    return Case.of(**{**given, **fields})


def call_of(built: Case) -> SparseCall:
    (call,) = build_problem(built, CPU).calls
    assert isinstance(call, SparseCall)
    return call


def visible(call: AttentionCall) -> list[int]:
    """Keys that each row's list names."""
    assert isinstance(call, SparseCall)
    return list(map(int, (call.selected >= 0).sum(1)))


def test_a_list_names_as_many_keys_as_the_row_sees_and_fit() -> None:
    call = call_of(case())
    assert visible(call) == [8, 8, 1, 6, 7, 8]
    for row, (first, bound) in enumerate([(0, 21), (0, 22), (22, 1), (23, 6), (23, 7), (23, 8)]):
        named = call.selected[row][call.selected[row] >= 0]
        assert len(set(named.tolist())) == len(named) and bool(((named >= first) & (named < first + bound)).all())


def test_lists_of_drawn_lengths_have_empty_ones_single_ones_and_full_ones_among_them() -> None:
    counts = visible(call_of(case(q=(1,) * 9, kv=(30,) * 9, fill="ragged")))
    assert counts[1] == 8 and counts[2] == 0 and counts[4] == 1 and max(counts) <= 8


@pytest.mark.parametrize("holes", ["end", "front", "scattered"])
def test_holes_stand_where_the_case_says(holes: str) -> None:
    call = call_of(case(fill="ragged", holes=holes, topk=16))
    named = (call.topk_indices >= 0).int()
    changes = named.diff(dim=1)
    assert visible(call) == named.sum(1).tolist()
    if holes != "scattered":
        assert bool((changes <= 0).all() if holes == "end" else (changes >= 0).all())
    else:
        assert bool((changes > 0).any()) and bool((changes < 0).any())


@pytest.mark.parametrize(("behind", "filling"), [("huge", 2**31 - 1), ("zero", 0), ("minus", -1)])
def test_behind_a_length_stands_what_the_case_says(behind: str, filling: int) -> None:
    call = call_of(case(fill="ragged", length=True, behind=behind, topk=16))
    assert call.topk_length is not None
    for row, length in enumerate(call.topk_length.tolist()):
        assert bool((call.topk_indices[row, length:] == filling).all())
        assert bool((call.topk_indices[row, :length] >= 0).all()) and length == visible(call)[row]


@pytest.mark.parametrize(
    "fields", [{}, {"call": "sparse_prefill"}, {"cache": "fp8"}, {"cache": "fp8_v4", "dims": "128-0-128-512"}]
)
def test_slots_lead_to_the_keys_that_the_golden_result_is_of(fields: dict[str, Any]) -> None:
    call = call_of(case(dtype="bf16", **fields))
    assert call.case.kv_lora_rank == call.width
    named = call.selected >= 0
    entries = gather(call.stored, call.topk_indices[named].long(), call.case.cache)
    read = dequantise(entries, call.case.cache, call.k_scale, torch.bfloat16)
    torch.testing.assert_close(read.double(), call.k[call.selected[named], 0], rtol=1e-6, atol=0.0)


def test_what_no_list_names_is_poison_if_the_case_says_so() -> None:
    call = call_of(case(unselected="poison", fill="ragged", layers=2))
    named = torch.unique(call.selected[call.selected >= 0])
    assert int(call.k.isfinite().all(-1).sum()) == len(named)
    assert int(call.kv_cache.isfinite().all(-1).sum()) == len(named)


@pytest.mark.parametrize("call", ["sparse_decode", "sparse_prefill"])
def test_poison_stands_before_and_behind_what_numbers_name(call: str) -> None:
    cache = call_of(case(call=call, spare=0)).stored
    whole = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
    last = cache.storage_offset() + cache.numel()
    assert min(cache.storage_offset(), len(whole) - last) >= cache.shape[1] * cache.shape[2]
    assert bool(whole[: cache.storage_offset()].isnan().all()) and bool(whole[last:].isnan().all())


def test_positions_and_own_tokens_are_those_of_the_request() -> None:
    by_slot, by_position = (call_of(case(space=space)) for space in ("slot", "position"))
    assert torch.equal(by_slot.selected, by_position.selected)
    first = torch.tensor([0, 0, 22, 23, 23, 23]).unsqueeze(1)
    want = torch.where(by_slot.selected < 0, NO_KEY, by_slot.selected - first)
    assert torch.equal(by_position.topk_indices.long(), want)
    assert torch.equal(call_of(case(space="rank_local")).topk_indices.long(), want)


def test_ranks_hold_parts_of_each_list_that_make_it_up() -> None:
    problem = build_problem(case(ranks=3, interleave=2, space="slot"), CPU)
    counts = [visible(call) for call in problem.attention]
    assert list(map(sum, zip(*counts, strict=True))) == [8, 8, 1, 6, 7, 8]
    expectation = golden_attention(problem)
    assert expectation.merged is not None
    merged = expectation.calls[0]
    for part in expectation.calls[1:]:
        merged = merge_states(merged, part)
    torch.testing.assert_close(merged.output, expectation.merged.output, rtol=1e-12, atol=1e-12)


def test_other_lists_of_one_meaning_have_one_golden_result() -> None:
    problem = build_problem(case(fill="ragged", length=True, behind="huge", topk=16), CPU)
    for other in (reversed_lists(problem), widened_lists(problem, 16)):
        assert other.key == problem.key
        assert wrong_rows(other) == []
    halves = [half_lists(problem, half) for half in (0, 1)]
    states = [golden_attention(half).calls[0] for half in halves]
    torch.testing.assert_close(
        merge_states(*states).output, golden_attention(problem).calls[0].output, rtol=1e-12, atol=1e-12
    )
    alone = lonely_row(problem, 4)
    assert visible(alone.attention[0]) == [0, 0, 0, 0, visible(problem.attention[0])[4], 0]
    assert all(wrong_rows(other) == [] for other in (*halves, alone))


def wrong_rows(problem: Problem) -> list[int]:
    """The rows of a float32 problem in which a right kernel is far from the golden result."""
    (call,) = problem.calls
    backend = Subject.of("EAGER", CPU).create(problem.case)
    call.prepare(backend)
    output, lse = call.invoke(backend, None)
    golden = golden_attention(problem).calls[0]
    close = torch.isclose(output.double(), golden.output, atol=1e-4).all(-1).all(-1)
    close &= torch.isclose(lse.double(), golden.lse, atol=1e-4).all(0)
    return [row for row, right in enumerate(close.tolist()) if not right]


def test_a_regrouped_batch_keeps_its_lists() -> None:
    call = regroup(build_problem(case(), CPU), [2, 0]).calls[0]
    assert isinstance(call, SparseCall) and visible(call) == [6, 7, 8, 8, 8]
    assert call.metadata.req_id_per_token.tolist() == [0, 0, 0, 1, 1] and call.key_lens == (8, 8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"call": "sparse_prefill", "cache": "fp8"}, "expected cache=auto, extra=none and ranks=1"),
        ({"ranks": 2, "sink": "drawn"}, "expected sink=none, extra=none and lse=1 where 2 ranks share the tokens"),
        ({"call": "sparse_prefill", "space": "rank_local"}, "gathered keys are on one rank"),
        ({"behind": "huge"}, "without lengths every entry counts, expected minus, got huge"),
        ({"cache": "fp4_v41"}, "field cache: expected one of auto, fp8, fp8_ds_mla, fp8_v4, fp8_v41, got 'fp4_v41'"),
        ({"extra": "fp4_v41"}, r"fp4_v41 holds 512 \+ 0 values of a 16-bit model, got \(32, 8\)"),
    ],
)
def test_a_case_that_contradicts_itself_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CaseError, match=said):
        case(**fields)
