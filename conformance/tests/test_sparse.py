"""Sparse problems are what their cases say, and wrong sparse kernels fail the capability that is theirs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.latent_entries import dequantise
from mla_conformance.backends.selected import Selected
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.judging.golden import expect
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.entry_pages import read_entries
from mla_conformance.reference.merge import merge_states
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse.call import SparseCall
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.lists import half_lists, lonely_row, reversed_lists, widened_lists
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.transform import regroup
from mla_conformance.vocabulary.capabilities import CAPABILITIES

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


def judged(kernel: type[EagerSparseBackend], asked: Case) -> Record:
    subject = Subject.of(f"{kernel.__module__}:{kernel.__name__}", CPU)
    return judge_one(subject, asked, CONTEXT)


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
    entries = read_entries(call.kv_cache, call.topk_indices[named].long(), call.case.cache)
    read = dequantise(entries, call.case.cache, call.k_scale, torch.bfloat16)
    torch.testing.assert_close(read.double(), call.k[call.selected[named], 0], rtol=1e-6, atol=0.0)


def test_what_no_list_names_is_poison_if_the_case_says_so() -> None:
    call = call_of(case(unselected="poison", fill="ragged", layers=2))
    named = torch.unique(call.selected[call.selected >= 0])
    assert int(call.k.isfinite().all(-1).sum()) == len(named)
    assert int(call.kv_cache.isfinite().all(-1).sum()) == len(named)


@pytest.mark.parametrize("call", ["sparse_decode", "sparse_prefill"])
def test_poison_stands_before_and_behind_what_numbers_name(call: str) -> None:
    cache = call_of(case(call=call, spare=0)).kv_cache
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
    expectation = expect(problem)
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
    states = [expect(half).calls[0] for half in halves]
    torch.testing.assert_close(merge_states(*states).output, expect(problem).calls[0].output, rtol=1e-12, atol=1e-12)
    alone = lonely_row(problem, 4)
    assert visible(alone.attention[0]) == [0, 0, 0, 0, visible(problem.attention[0])[4], 0]
    assert all(wrong_rows(other) == [] for other in (*halves, alone))


def wrong_rows(problem: Problem) -> list[int]:
    """The rows of a float32 problem in which a right kernel is far from the golden result."""
    (call,) = problem.calls
    backend = Subject.of("EAGER", CPU).create(problem.case)
    call.prepare(backend)
    output, lse = call.invoke(backend, None)
    golden = expect(problem).calls[0]
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


class IgnoresLength(EagerSparseBackend):
    def _listed(self, source: Selected) -> torch.Tensor:
        return source.indices != NO_KEY


class ReadsSlotZero(EagerSparseBackend):
    """For padding, as if it named a key."""

    def _listed(self, source: Selected) -> torch.Tensor:
        return torch.ones_like(source.indices, dtype=torch.bool)

    def _slots(self, source: Selected, request: torch.Tensor) -> torch.Tensor:
        return super()._slots(source, request).clamp(min=0)


class ReadsBefore(EagerSparseBackend):
    """-1 is an address, of weight 0."""

    def _entries(self, source: Selected, slots: torch.Tensor) -> torch.Tensor:
        width = source.cache.shape[2]
        before = source.cache.as_strided((1, width), (width, 1), source.cache.storage_offset() - width)
        rows = super()._entries(source, slots)
        rows[slots == 0] = before
        return rows

    def _keys(self, source: Selected, slots: Any, visible: torch.Tensor, k_scale: Any) -> torch.Tensor:
        return super()._keys(source, slots, torch.ones_like(visible), k_scale)


class StopsAtPadding(EagerSparseBackend):
    def _listed(self, source: Selected) -> torch.Tensor:
        return super()._listed(source).cumprod(dim=1).bool()


class CountsOnce(EagerSparseBackend):
    def _listed(self, source: Selected) -> torch.Tensor:
        same = source.indices.unsqueeze(2) == source.indices.unsqueeze(1)
        return super()._listed(source) & ~same.tril(-1).any(dim=2)


class TakesPositionsForSlots(EagerSparseBackend):
    def _slots(self, source: Selected, request: torch.Tensor) -> torch.Tensor:
        return source.indices.long().clamp(min=0)


class DropsSink(EagerSparseBackend):
    def _with_sink(self, output: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
        return output


class ScalesSink(EagerSparseBackend):
    def _with_sink(self, output: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
        return super()._with_sink(output, lse, None if sink is None else sink * self.scale)


class DropsSecondCache(EagerSparseBackend):
    def attend(self, q: Any, sources: Any, k_scale: Any, sink: Any) -> Any:
        return super().attend(q, sources[:1], k_scale, sink)


class ReadsScalesInPlace(EagerSparseBackend):
    """The scales of V4 behind each entry's data."""

    def _entries(self, source: Selected, slots: torch.Tensor) -> torch.Tensor:
        return source.cache[slots // source.cache.shape[1], slots % source.cache.shape[1]]


class SwapsHalves(EagerSparseBackend):
    """The high half of a byte holds the first of two codes."""

    def _entries(self, source: Selected, slots: torch.Tensor) -> torch.Tensor:
        rows = super()._entries(source, slots)
        if source.layout == "fp4_v41":
            codes = rows[..., :256]
            rows[..., :256] = codes << 4 | codes >> 4
        return rows


class FirstListForAll(EagerSparseBackend):
    def attend(self, q: Any, sources: Any, k_scale: Any, sink: Any) -> Any:
        main = replace(sources[0], indices=sources[0].indices[:1].expand_as(sources[0].indices))
        return super().attend(q, [main, *sources[1:]], k_scale, sink)


class OwnsEverything(EagerSparseBackend):
    def _held(self, source: Selected) -> torch.Tensor:
        return torch.ones_like(source.indices, dtype=torch.bool)


class MultipliesPadding(EagerSparseBackend):
    """What is not named weighs 0, whatever it holds."""

    def _keys(self, source: Selected, slots: Any, visible: torch.Tensor, k_scale: Any) -> torch.Tensor:
        return super()._keys(source, slots, torch.ones_like(visible), k_scale)


KILLED: dict[type[EagerSparseBackend], tuple[str, dict[str, Any]]] = {
    IgnoresLength: ("selection_length", {"fill": "ragged", "length": True, "behind": "stale"}),
    ReadsSlotZero: ("selection_padding", {"fill": "ragged"}),
    ReadsBefore: ("selection_padding", {"fill": "ragged"}),
    StopsAtPadding: ("selection_padding", {"fill": "ragged", "holes": "scattered", "data": "needle"}),
    CountsOnce: ("selection_order", {"repeats": True}),
    TakesPositionsForSlots: ("index_spaces", {"space": "position"}),
    DropsSink: ("attention_sinks", {"sink": "drawn"}),
    ScalesSink: ("attention_sinks", {"sink": "drawn"}),
    DropsSecondCache: ("second_cache", {"extra": "auto"}),
    FirstListForAll: ("selection_rows", {"q": (3,), "kv": (20,)}),
    OwnsEverything: ("sparse_dcp", {"ranks": 2, "space": "position"}),
    MultipliesPadding: ("unselected_keys", {"fill": "ragged", "unselected": "poison"}),
}


@pytest.mark.parametrize("kernel", KILLED)
def test_a_wrong_kernel_fails_its_capability(kernel: type[EagerSparseBackend]) -> None:
    capability, fields = KILLED[kernel]
    asked = case(capability=capability, call="sparse_decode", **fields)
    assert judged(EagerSparseBackend, asked).status is Status.PASS
    assert judged(kernel, asked).status is Status.FAIL


@pytest.mark.parametrize(
    ("kernel", "capability"), [(ReadsScalesInPlace, "sparse_fp8_v4"), (SwapsHalves, "sparse_fp4_v41")]
)
def test_a_format_that_is_read_otherwise_fails(kernel: type[EagerSparseBackend], capability: str) -> None:
    assert judged(kernel, CAPABILITIES[capability].cases[-1]).status is Status.FAIL
