"""A sparse layer's inputs have one right answer, the golden layer of the proof gives it, and what differs is seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager_sparse_layer import EagerSparseLayerBackend
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.defects.honest_sparse import HONEST_SPARSE_LAYERS
from mla_conformance.defects.known import known_defects
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.reference.index_scores import index_scores
from mla_conformance.reference.kv_cache import PagedContext
from mla_conformance.reference.layer import latents, mla_layer
from mla_conformance.reference.layer_index import index_queries, index_weights
from mla_conformance.reference.quantization import E4M3_MAX, quantize_e4m3
from mla_conformance.roles.sparse_layer.call import SparseLayerCall, SparseLayerOnRanks
from mla_conformance.roles.sparse_layer.case import SparseLayerCase
from mla_conformance.roles.sparse_layer.hidden_states import MARGIN
from mla_conformance.roles.sparse_layer.problem import SparseLayerBatch
from mla_conformance.roles.sparse_layer.role import SPARSE_LAYER
from mla_conformance.roles.table import build_problem, golden_of
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CPU, CONTEXT = torch.device("cpu"), Context()
MIXED = "sparse_layer:q=[1,1,9];kv=[40,70,30];decodes=2"
TILES = "sparse_layer:dims=32-64-32-512;q=[1,9];kv=[20,0];decodes=1;cache=fp8_ds_mla;scales=pow2;pairs=neighbours"
SHARED = "sparse_layer:q=[1,12];kv=[40,0];decodes=1;shared=1;layer_pairs=halves;data=integers"
HALVES = "sparse_layer:dtype=fp16;q=[3,17];kv=[30,5];index_heads=9;topk=16;rope_last=1;index_cache=auto"
LISTED = [case for name in ("sparse_layer", "sparse_layer_caches") for case in CAPABILITIES[name].cases]


def batch(text: str) -> SparseLayerBatch:
    """What a case is made of."""
    made = SparseLayerBatch(case_of(text), CPU, "")
    made.calls()
    return made


def case_of(text: str) -> SparseLayerCase:
    case = Case.parse(text)
    assert isinstance(case, SparseLayerCase)
    return case


def output_of(text: str) -> torch.Tensor:
    """What EAGER returns by heads."""
    call = called(text)
    kernel = SPARSE_LAYER.kernel(EagerSparseLayerBackend, call.case, torch.bfloat16, CPU)
    call.prepare(kernel)
    output = call.invoke(kernel, None)
    assert isinstance(output, torch.Tensor)
    return output


def judged(kernel: type, text: str) -> Record:
    return judge_one(Subject.of(f"{kernel.__module__}:{kernel.__name__}", CPU), Case.parse(text), CONTEXT)


@pytest.mark.parametrize("path", ["compute_friendly", "data_movement_friendly", "chunked_prefill"])
@pytest.mark.parametrize("text", [MIXED, TILES, SHARED, HALVES])
def test_the_golden_result_is_that_of_the_layer_that_is_proven(text: str, path: Any) -> None:
    made, expected = batch(text), golden_of(build_problem(Case.parse(text), CPU))
    assert isinstance(expected, GoldenAttention)
    layer, case = made.layer, made.case
    old = ~made.new
    cached = torch.cat(latents(made.hidden[old], made.positions[old], layer.weights, layer.spec), dim=1)
    pages = torch.nn.utils.rnn.pad_sequence([cached[rows] for rows in segments(start_loc(case.kv))], batch_first=True)
    context = PagedContext(pages, torch.arange(len(case.kv)).unsqueeze(1), case.kv, 4 * pages.shape[1])
    output = mla_layer(
        made.hidden[made.new],
        made.positions[made.new],
        layer.weights,
        layer.spec,
        query_start_loc=made.counted,
        context=context,
        path=path,
        selected=made.lists,
    )
    own = expected.calls[0].output.flatten(1) @ layer.weights.W_O
    torch.testing.assert_close(output, own, rtol=0, atol=2e-3 * float(own.abs().max()))


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.id)
def test_what_is_stored_is_the_same_whatever_rounds(case: SparseLayerCase) -> None:
    """Every value is so near to one of the model's dtype that half a step in either direction lies beyond it."""
    made = SparseLayerBatch(case, CPU, "")
    parts = *latents(made.hidden, made.positions, made.layer.weights, made.layer.spec), made.keys
    for exact in parts:
        rounded = exact.to(made.dtype)
        step = torch.finfo(made.dtype).eps / 2 * rounded.double().abs()
        assert bool(((exact - rounded.double()).abs() <= step / 4).all())


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.id)
def test_codes_move_scores_by_a_fraction_of_the_margin(case: SparseLayerCase) -> None:
    made = SparseLayerBatch(case, CPU, "")
    layer, positions = made.layer, made.positions[made.new]
    q = index_queries(made.query_latent, positions, layer.index, layer.index_spec).values
    starts = {"query_start_loc": made.counted, "key_start_loc": start_loc(case.totals)}
    own = index_weights(made.hidden[made.new], layer.index)
    coded = index_scores(in_codes(q), own, in_codes(made.keys), **starts)
    exact = made.scores.scores.masked_fill(~made.scores.visible, 0.0)
    moved = (coded.scores.masked_fill(~coded.visible, 0.0) - exact).abs().amax(dim=1)
    selecting = made.bounds > case.topk
    assert bool((moved[selecting] < MARGIN / 5 * exact.amax(dim=1)[selecting]).all())


def in_codes(x: torch.Tensor) -> torch.Tensor:
    """What rows mean as e4m3 codes with a scale each."""
    scale = x.abs().amax(dim=-1, keepdim=True) / E4M3_MAX
    return quantize_e4m3(x / scale, 1.0).double() * scale


@pytest.mark.parametrize("kernel", HONEST_SPARSE_LAYERS, ids=lambda kernel: kernel.__name__)
def test_honest_layers_pass(kernel: type) -> None:
    shortcut = "sparse_layer_dense_shortcut:call=sparse_layer;q=[1,5,4];kv=[3,3,40];decodes=1"
    for text in (MIXED, TILES, shortcut, f"{MIXED};tp=2"):
        record = judged(kernel, text)
        assert record.status is Status.PASS, record.message


def called(text: str) -> SparseLayerCall:
    """A call that EAGER has made."""
    problem = build_problem(Case.parse(text), CPU)
    (call,) = problem.calls
    assert isinstance(call, SparseLayerCall)
    kernel = SPARSE_LAYER.kernel(EagerSparseLayerBackend, problem.case, problem.dtype, CPU)
    call.prepare(kernel)
    call.invoke(kernel, None)
    assert not call.wrong_writes()
    return call


WRITES: dict[str, tuple[str, str, Callable[[torch.Tensor], Any], str]] = {
    "another token": (MIXED, "topk_indices_buffer", lambda x: x[0].add_(1), "row 0 (query 0 of request 0) names"),
    "twice the same": (MIXED, "topk_indices_buffer", lambda x: x[3, 1].copy_(x[3, 0]), "names 7 of 8 tokens"),
    "rows behind": (MIXED, "topk_indices_buffer", lambda x: x[11].fill_(-1), "row 11 was written, expected it as it"),
    "shared lists": (SHARED, "topk_indices_buffer", lambda x: x[0].copy_(x[0].flip(0)), "row 0 was written"),
    "latents": (MIXED, "kv_cache", lambda x: x[0].zero_(), "kv_cache: slot 0 of the cache was written"),
    "index keys": (MIXED, "index_kv_cache", lambda x: x[0].zero_(), "index_kv_cache: slot 0 of the cache was written"),
}


@pytest.mark.parametrize(("text", "name", "change", "said"), WRITES.values(), ids=WRITES)
def test_what_is_written_otherwise_is_told(text: str, name: str, change: Callable[..., Any], said: str) -> None:
    call = called(text)
    change(call.written[name].cache)
    assert said in call.wrong_writes()


def on_ranks(text: str) -> tuple[SparseLayerOnRanks, Any]:
    """A call that EAGER's ranks have made, and their sum by heads."""
    problem = build_problem(Case.parse(text), CPU)
    (call,) = problem.calls
    assert isinstance(call, SparseLayerOnRanks)
    layers = SPARSE_LAYER.kernel(EagerSparseLayerBackend, problem.case, problem.dtype, CPU)
    call.prepare(layers)
    return call, call.invoke(layers, None)


def test_ranks_are_handed_their_heads_and_caches_of_their_own() -> None:
    (call, _), whole = on_ranks(f"{MIXED};tp=2"), batch(MIXED).layer.handed(case_of(MIXED), torch.bfloat16, CPU, 0)
    parts, memory = call.parts, [x.data_ptr() for x in call.reached]
    for name, dim in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
        assert torch.equal(torch.cat([getattr(p.weights, name) for p in parts], dim), getattr(whole, name))
    for part in parts:
        assert whole.indexer and part.weights.indexer
        assert torch.equal(part.weights.indexer.wq_b, whole.indexer.wq_b)
    assert len(memory) == len(set(memory)) and not call.wrong_writes()


def test_what_ranks_return_is_added_and_each_of_them_is_held_to_its_selection() -> None:
    call, together = on_ranks(f"{MIXED};tp=2")
    alone = output_of(MIXED)
    torch.testing.assert_close(together.float(), alone.float(), rtol=0.02, atol=0.02)
    results = [torch.zeros(11, part.weights.o_proj.shape[0], dtype=torch.bfloat16) for part in call.parts]
    assert call.joined(results).shape == alone.shape and not call.joined(results).any()
    wrong = results[0][:, 1:]
    assert call.joined([results[0], wrong]) is wrong
    call.parts[1].written["topk_indices_buffer"].cache[0].add_(1)
    assert call.wrong_writes().startswith("on rank 1, topk_indices_buffer: row 0 (query 0 of request 0) names")


def test_rows_of_short_prefills_and_of_padding_may_hold_anything() -> None:
    call = called("sparse_layer:q=[1,5];kv=[3,3];decodes=1;pad=2")
    buffer = call.written["topk_indices_buffer"].cache
    buffer[1:8] = 77
    assert not call.wrong_writes()
    buffer[0] = 77
    assert "row 0 (query 0 of request 0) names 0 of 4 tokens" in call.wrong_writes()


def test_a_wrong_selection_is_told_before_a_wrong_output() -> None:
    record = judged(known_defects()["sparse-layer-own-token-always-selected"].kernel, MIXED)
    assert record.status is Status.FAIL and record.check is Check.WRITTEN
    assert "topk_indices_buffer: row 0" in record.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": lambda x: x.int()}, r"positions: expected \[11\] of torch.int64, got \[11\] of torch.int32"),
        ({"hidden_states": lambda x: x[1:]}, r"hidden_states: expected \[11, "),
        ({"hidden_states": lambda x: x.float()}, "hidden_states: expected .* of torch.bfloat16, got .* torch.float32"),
        ({"cos_sin_cache": lambda x: x[:, 1:]}, "cos_sin_cache: expected"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Callable[..., Any]], said: str) -> None:
    call = called(MIXED)
    wrong = replace(call, **{name: made(getattr(call, name)) for name, made in change.items()})
    kernel = SPARSE_LAYER.kernel(EagerSparseLayerBackend, call.case, torch.bfloat16, CPU)
    call.prepare(kernel)
    with pytest.raises(ValueError, match=said):
        wrong.invoke(kernel, None)
    assert "is not the new token's" in call.wrong_writes()  # nothing was written


def test_an_index_cache_of_a_layer_without_an_indexer_is_refused() -> None:
    call, other = called(SHARED), called(SHARED.replace("shared=1;", ""))
    kernel = SPARSE_LAYER.kernel(EagerSparseLayerBackend, call.case, torch.bfloat16, CPU)
    call.prepare(kernel)
    with pytest.raises(ValueError, match="index_kv_cache: expected none"):
        replace(call, written={**call.written, "index_kv_cache": other.written["index_kv_cache"]}).invoke(kernel, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("q=[1];kv=[3];topk=9", "field topk: expected an even number from 6 to 12, or a multiple of one of 4 beyond"),
        ("q=[1];kv=[3];topk=4", "since 4 index heads tell so many groups of keys apart, got 4"),
        ("q=[1];kv=[3];dims=32-32-32-96;data=integers", "integers has latents of whole 64 columns"),
        ("q=[1];kv=[3];decodes=2", "field decodes: expected at most the 1 requests, got 2"),
        ("q=[1];kv=[3];dims=32-32-256-128", "field dims: expected pairs to rotate"),
        ("q=[1];kv=[3];ranks=2", "field ranks: a sparse layer's ranks share heads, tp, and no tokens, got 2"),
        ("q=[1];kv=[3];tp=3", "field heads: expected a multiple of the 3 ranks, got 4"),
        ("q=[1];kv=[3];index_cache=auto;index_scales=pow2", "field index_scales: an index cache of auto has no scales"),
        ("q=[1];kv=[3];data=needle", "field data: expected one of normal, integers"),
    ],
)
def test_cases_that_nothing_can_be_built_for(fields: str, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        Case.parse(f"sparse_layer:{fields}")
