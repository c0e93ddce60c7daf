"""The golden layers that the proof holds against models are those that judge; what differs in a sparse one is seen."""

from typing import Any, get_args

import pytest
import torch

from mla_conformance.backends.eager_sparse_layer import EagerSparseLayerBackend
from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.reference.layer import ModelDimensions, PagedContext, Path, WholeLayer, mla_layer
from mla_conformance.reference.projections import MLAWeights, latents, split_kv_b_proj
from mla_conformance.roles.definition import build_problem, golden_of
from mla_conformance.roles.layer.problem import LayerBatch
from mla_conformance.roles.sparse_layer.problem import SPARSE_LAYER, SparseLayerBatch
from mla_conformance.tests.drawn import CPU

MIXED = "sparse_layer:q=[1,1,9];kv=[40,70,30];decodes=2"
TILES = "sparse_layer:dims=32-64-32-512;q=[1,9];kv=[20,0];decodes=1;cache=fp8_ds_mla;scales=pow2;pairs=neighbours"
SHARED = "sparse_layer:q=[1,12];kv=[40,0];decodes=1;shared=1;layer_pairs=halves;data=integers"
HALVES = "sparse_layer:dtype=fp16;q=[3,17];kv=[30,5];index_heads=9;topk=16;rope_last=1;index_cache=auto"


def batch(text: str) -> SparseLayerBatch:
    case: Any = Case.parse(text)
    made = SparseLayerBatch(case, CPU, "")
    made.calls()
    return made


PROVEN = {MIXED: "compute_friendly", TILES: "data_movement_friendly", SHARED: "chunked_prefill"}
PROVEN |= {HALVES: "data_movement_friendly"}


@pytest.mark.parametrize(("text", "path"), PROVEN.items())
def test_the_golden_result_is_that_of_the_layer_that_is_proven(text: str, path: Any) -> None:
    made, expected = batch(text), golden_of(build_problem(Case.parse(text), CPU))
    assert isinstance(expected, GoldenAttention)
    case, old = made.case, ~made.new
    cached = torch.cat(latents(made.hidden[old], made.positions[old], made.weights, made.spec), dim=1)
    pages = torch.nn.utils.rnn.pad_sequence([cached[rows] for rows in segments(start_loc(case.kv))], batch_first=True)
    context = PagedContext(pages, torch.arange(len(case.kv)).unsqueeze(1), case.kv, 4 * pages.shape[1])
    options: Any = {"query_start_loc": made.counted, "context": context, "path": path, "selected": made.lists}
    new = made.hidden[made.new], made.positions[made.new]
    sizes: Any = {"q_lora_rank": case.q_lora_rank, "kv_lora_rank": case.kv_lora_rank, "head": case.dimensions}
    dims = ModelDimensions(hidden_size=case.hidden_size, num_heads=case.heads, **sizes)
    spec = WholeLayer(**vars(made.spec), model=text, dims=dims, scale=case.softmax_scale, selects=True)
    output = mla_layer(*new, made.weights, spec, **options)
    own = expected.calls[0].output.flatten(1) @ made.weights.W_O
    torch.testing.assert_close(output, own, rtol=0, atol=2e-3 * float(own.abs().max()))


def called(text: str) -> tuple[Any, Any]:
    problem = build_problem(Case.parse(text), CPU)
    (call,) = problem.calls
    kernel = SPARSE_LAYER.kernel(EagerSparseLayerBackend, problem.case, problem.dtype, CPU)
    call.prepare(kernel)
    output = call.invoke(kernel, None)
    assert not call.wrong_writes()
    return call, output


def test_what_ranks_return_is_added_and_rows_of_short_prefills_and_padding_may_hold_anything() -> None:
    (call, together), (_, alone) = called(f"{MIXED};tp=2"), called(MIXED)
    torch.testing.assert_close(together.float(), alone.float(), rtol=0.02, atol=0.02)
    results = [torch.zeros(11, part.weights.o_proj.shape[0], dtype=torch.bfloat16) for part in call.parts]
    one, parts = call.parts[0], call.parts
    assert one.joined(results, parts).shape == alone.shape and not one.joined(results, parts).any()
    wrong = results[0][:, 1:]
    assert one.joined([results[0], wrong], parts) is wrong
    call, _ = called("sparse_layer:q=[1,5];kv=[3,3];decodes=1;pad=2")
    buffer = call.written["topk_indices_buffer"].cache
    buffer[1:8] = 77
    assert not call.wrong_writes()
    buffer[0] = 77
    assert "row 0 (query 0 of request 0) names 0 of 4 tokens" in call.wrong_writes()


CASES = [
    "mixed_batch:call=layer;dims=32-16-32-64;heads=3;q=[2,1,9,5];kv=[30,4,40,0];data=needle;decodes=2;"
    "order=decodes_first",
    "cache_write:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[12,15];decodes=1;cache=fp8;kscale=31000",
    "weight_absorption:call=layer;dims=64-16-96-64;heads=2;q=[5,1];kv=[0,33];decodes=1;weights=dense;scale=50",
    "mixed_batch:call=layer;dims=r1;heads=1;q=[3,2];kv=[20,9];decodes=1;cache=fp8_ds_mla",
]


@pytest.mark.parametrize("path", get_args(Path))
@pytest.mark.parametrize("text", CASES)
def test_the_golden_result_of_a_layer_is_that_of_the_one_that_is_proven(text: str, path: Path) -> None:
    case: Any = Case.parse(text)
    made, expected = LayerBatch(case, CPU, ""), golden_of(build_problem(case, CPU))
    made.calls()
    hidden, context = states_of(made)
    spec, weights = picking_layer(made, hidden.shape[1])
    positions, starts = torch.arange(len(hidden)), made.query_start_loc
    output = mla_layer(hidden, positions, weights, spec, query_start_loc=starts, context=context, path=path)
    assert isinstance(expected, GoldenAttention)
    own = expected.calls[0].output.flatten(1)
    torch.testing.assert_close(output[:, : own.shape[1]], own, rtol=1e-11, atol=1e-11 * float(own.abs().max()))


def states_of(made: LayerBatch) -> tuple[torch.Tensor, PagedContext]:
    """Hidden states [T, H] in which queries and new latents stand side by side, and those of the context as stored."""
    seen, case = torch.cat(made.seen, dim=1), made.case
    spans = zip(segments(start_loc(made.totals)), case.kv, case.q, strict=True)
    parts = [seen[rows].split((kv, q)) for rows, kv, q in spans]
    pages = torch.nn.utils.rnn.pad_sequence([old for old, _ in parts], batch_first=True)
    table = torch.arange(len(parts)).unsqueeze(1)
    hidden = torch.cat((made.queries.double().flatten(1), torch.cat([new for _, new in parts])), dim=1)
    return hidden, PagedContext(pages, table, case.kv, len(parts) * pages.shape[1])


def picking_layer(made: LayerBatch, width: int) -> tuple[WholeLayer, MLAWeights]:
    """A layer whose projections pick columns of such hidden states, and that returns its heads side by side."""
    case, head = made.case, made.case.dimensions
    columns, latent = torch.eye(width, dtype=torch.float64), case.kv_lora_rank
    own, cached = columns.tensor_split([case.heads * head.qk_head_dim], dim=1)
    w_uq, w_qr = own.unflatten(1, (case.heads, -1)).tensor_split([head.qk_nope_head_dim], dim=-1)
    w_dkv, w_kr = cached.tensor_split([latent], dim=1)
    w_uk, w_uv = split_kv_b_proj(made.weight, head.qk_nope_head_dim)
    w_o = columns[: case.heads * head.v_head_dim]
    weights = MLAWeights(W_DQ=None, W_UQ=w_uq, W_QR=w_qr, W_DKV=w_dkv, W_KR=w_kr, W_UK=w_uk, W_UV=w_uv, W_O=w_o)
    sizes = ModelDimensions(hidden_size=width, num_heads=case.heads, q_lora_rank=None, kv_lora_rank=latent, head=head)
    return WholeLayer(model="picking", dims=sizes, scale=case.softmax_scale, rotation=None), weights
