"""The golden layer that ``test_proof.py`` holds against others is the one that judges layers: its result is theirs."""

from typing import get_args

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.reference.dimensions import ModelDimensions
from mla_conformance.reference.kv_cache import PagedContext
from mla_conformance.reference.layer import LayerSpec, mla_layer
from mla_conformance.reference.mla import Path
from mla_conformance.reference.projections import MLAWeights, split_kv_b_proj
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.roles.layer.problem import LayerBatch
from mla_conformance.roles.table import build_problem, golden_of

CPU = torch.device("cpu")
CASES = [
    "mixed_batch:call=layer;dims=32-16-32-64;heads=3;q=[2,1,9,5];kv=[30,4,40,0];data=needle;decodes=2;"
    "order=decodes_first",
    "cache_write:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[12,15];decodes=1;cache=fp8;kscale=31000",
    "weight_absorption:call=layer;dims=64-16-96-64;heads=2;q=[5,1];kv=[0,33];decodes=1;weights=dense;scale=50",
    "mixed_batch:call=layer;dims=r1;heads=1;q=[3,2];kv=[20,9];decodes=1;cache=fp8_ds_mla",
]


@pytest.mark.parametrize("path", get_args(Path))
@pytest.mark.parametrize("text", CASES)
def test_the_golden_result_is_that_of_the_layer_that_is_proven(text: str, path: Path) -> None:
    case = Case.parse(text)
    assert isinstance(case, LayerCase)
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
    parts = [
        seen[rows].split((kv, q)) for rows, kv, q in zip(segments(start_loc(made.totals)), case.kv, case.q, strict=True)
    ]
    pages = torch.nn.utils.rnn.pad_sequence([old for old, _ in parts], batch_first=True)
    table = torch.arange(len(parts)).unsqueeze(1)
    hidden = torch.cat((made.queries.double().flatten(1), torch.cat([new for _, new in parts])), dim=1)
    return hidden, PagedContext(pages, table, case.kv, len(parts) * pages.shape[1])


def picking_layer(made: LayerBatch, width: int) -> tuple[LayerSpec, MLAWeights]:
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
    return LayerSpec(model="picking", dims=sizes, scale=case.softmax_scale, rotation=None), weights
