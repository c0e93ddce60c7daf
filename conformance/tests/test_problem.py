"""From case to tensors: the same bytes each time, the layouts of a model, and poison wherever nothing may be read."""

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.operands import TORCH_DTYPES, ProblemError, stored
from mla_conformance.problems.problem import Problem
from mla_conformance.problems.regimes import REGIMES, Site
from mla_conformance.roles.prefill import problem as prefill
from mla_conformance.roles.prefill.call import PrefillCall
from mla_conformance.roles.table import build_problem

CPU = torch.device("cpu")
CHUNKED = "chunked_context:dims=small;q=[5,1,3];kv=[40,0,20];workspace=64"


def built(text: str) -> Problem:
    return build_problem(Case.parse(text), CPU)


def all_bytes(problem: Problem) -> dict[str, bytes]:
    return {name: storage_bytes(tensor).numpy().tobytes() for name, tensor in problem.caller_owned.items()}


@pytest.mark.parametrize("text", ["lse:dims=small;q=[5,9]", "context_chunk:dims=small;q=[5];kv=[7]", CHUNKED])
def test_a_case_stands_for_the_same_bytes_each_time(text: str) -> None:
    torch.manual_seed(1)
    first = all_bytes(built(text))
    torch.manual_seed(2)
    assert all_bytes(built(text)) == first
    assert all_bytes(built(f"{text};seed=1")) != first


@pytest.mark.parametrize(
    "text",
    [
        "lse:dims=small;q=[5,9];layout=odd",
        CHUNKED,
        "decode:call=decode;dims=small;q=[1,1];kv=[40,7];page=16",
        "mixed_batch:call=layer;q=[1,4];kv=[9,5];decodes=1",
    ],
)
def test_what_one_writes_another_does_not_see(text: str) -> None:
    first = built(text)
    before = all_bytes(first)
    for tensor in (*first.caller_owned.values(), *(call.v for call in first.attention)):
        storage_bytes(tensor).fill_(7)
    assert all_bytes(built(text)) == before


def test_calls_have_the_shapes_of_the_interface() -> None:
    new, chunk, *_ = built(CHUNKED).attention
    assert (new.name, chunk.name) == ("new tokens", "context chunk 0")
    assert new.q.shape == new.k.shape == (9, 4, 24) and new.v.shape == (9, 4, 16)
    assert chunk.k.shape == (52, 4, 24) and chunk.key_start_loc == (0, 32, 32, 52)
    assert chunk.q.data_ptr() != 0 and torch.equal(chunk.q, new.q)


def test_the_chunks_hold_every_context_token_once_and_unused_memory_is_poisoned() -> None:
    problem = built(CHUNKED)
    call = problem.calls[0]
    assert isinstance(call, PrefillCall)
    context = call.metadata.chunked_context
    assert context is not None and context.seq_lens.sum(0).tolist() == [40, 0, 20]
    assert len(problem.calls) == 1 + len(context.seq_tot)
    used = max(context.seq_tot)
    assert bool(context.workspace[used:].isnan().all()) and not bool(
        context.workspace[: context.seq_tot[-1]].isnan().any()
    )
    assert call.metadata.block_table[1].tolist() == [0, 0, 0]
    assert all(not call.k.isnan().any() and not call.v.isnan().any() for call in problem.attention)


def test_padding_rows_are_poison_behind_the_last_counted_token() -> None:
    problem = built("no_side_effects:dims=small;q=[5,2];pad=3")
    (call,) = problem.attention
    assert call.q.shape[0] == 10 and problem.query_start_loc == (0, 5, 7)
    for tensor in (call.q, call.k, call.v):
        assert bool(tensor[7:].isnan().all()) and not bool(tensor[:7].isnan().any())


@pytest.mark.parametrize("layout", ["kv_b_proj", "packed", "sliced", "heads_first"])
def test_a_layout_changes_strides_and_nothing_else(layout: str) -> None:
    (call,) = built(f"strided_inputs:dims=small;heads=3;q=[5];layout={layout}").attention
    assert (call.q.shape, call.k.shape, call.v.shape) == ((5, 3, 24), (5, 3, 24), (5, 3, 16))
    assert call.q.is_contiguous() == (layout in ("kv_b_proj", "packed"))
    assert call.v.is_contiguous() == (layout == "packed")
    if layout == "kv_b_proj":  # the second half of a projection
        assert call.v.stride(-1) == 1 and call.v.stride(1) > 16 and call.v.storage_offset() > 0
    assert not any(tensor.isnan().any() for tensor in (call.q, call.k, call.v))


@pytest.mark.parametrize("name", [name for name, regime in REGIMES.items() if regime.by_element])
def test_queries_that_follow_from_their_own_elements_need_no_keys_and_no_other_rows(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(5, 3, 8, generator=draw), torch.randn(70, 3, 8, generator=draw)
    alone = [REGIMES[name].queries(Site(q[[row]], k, 0.3, (69, 0, 63, 64), causal=True)) for row in range(len(q))]
    assert torch.equal(REGIMES[name].new_queries(q.clone(), 0.3, lambda: iter(())), torch.cat(alone))


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_makes_finite_inputs_and_codes(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rest in ("q=[1,9]", "call=context_chunk;q=[2,3];kv=[0,40]"):
        (call,) = built(f"lse:dims=small;{rest};data={regime}").attention
        assert all(bool(tensor.isfinite().all()) for tensor in (call.q, call.k, call.v))
    monkeypatch.setattr(prefill, "_COUNTED_ELEMENTS", 1)
    (call,) = built(f"fp8_operands:dims=small;dtype=e4m3;q=[1,9];data={regime}").attention
    assert call.k.dtype == torch.float8_e4m3fn and bool(call.k.float().isfinite().all())


def test_codes_need_a_torch_with_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TORCH_DTYPES, "e4m3", None)
    with pytest.raises(ProblemError, match="dtype e4m3 needs a torch with float8, this is "):
        built("fp8_operands:dtype=e4m3;q=[1]")


def test_operands_in_e4m3_saturate_whatever_a_cast_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = torch.Tensor.to

    def as_torch_2_11(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return cast(x.masked_fill(x.abs() > 464, torch.nan), dtype)

    monkeypatch.setattr(torch.Tensor, "to", as_torch_2_11)
    found = stored(torch.tensor([500.0, -1e4, 1.0]), torch.float8_e4m3fn)
    monkeypatch.undo()
    assert found.float().tolist() == [448.0, -448.0, 1.0]
