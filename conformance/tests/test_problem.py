"""From case to tensors: the same bytes each time, poison and guards, and copies and what tells that bytes changed."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving import driver
from mla_conformance.judging.record import Status
from mla_conformance.problems import memory, operands
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.memory import Guarded, Original, Snapshot, out_of_memory, same_bytes, storage_bytes
from mla_conformance.problems.operands import fill_normal, stored
from mla_conformance.roles.definition import build_problem
from mla_conformance.roles.prefill import problem as prefill
from mla_conformance.tests.drawn import CPU, judged


def built(text: str) -> Problem:
    return build_problem(Case.parse(text), CPU)


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("decode:dims=small;q=[1,2,1,1];kv=[9,70,5,33]", "low_rank", "needle"),
        ("new_tokens:dims=small;q=[5,9,0,4]", "rising", "shifted"),
        ("chunked_context:dims=small;q=[5,9,1,4];kv=[20,70,0,33]", "integers", "hot_ones"),
        ("sparse_decode:dims=small;q=[1,2,1,1];kv=[9,70,5,33];topk=64", "needle", "tiny_values"),
        ("select:q=[1,2,1,1];kv=[9,70,5,33]", "falling", "masked"),
        ("prepare_index:q=[1,2,1,1];kv=[9,70,5,33]", "integers", "outliers"),
    ],
)
def test_requests_have_data_regimes_in_turn(text: str, first: str, second: str) -> None:
    both, *alone = (built(f"{text};data={data}").calls[0] for data in (f"{first}+{second}", first, second))
    for request, rows in enumerate(operands.segments(both.query_start_loc)):
        expected = alone[request % 2].q[rows]
        torch.testing.assert_close(both.q[rows], expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(alone[0].q.nan_to_num(), alone[1].q.nan_to_num())
    assert Case.parse(f"{text};data={first}+{second}").regimes == (second, first)  # the second request is the longest


def test_operands_in_e4m3_saturate_whatever_a_cast_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = torch.Tensor.to

    def as_torch_2_11(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return cast(x.masked_fill(x.abs() > 464, torch.nan), dtype)

    monkeypatch.setattr(torch.Tensor, "to", as_torch_2_11)
    found = stored(torch.tensor([500.0, -1e4, 1.0]), torch.float8_e4m3fn)
    monkeypatch.undo()
    assert found.float().tolist() == [448.0, -448.0, 1.0]


def test_chunks_do_not_show_and_large_keys_are_drawn_by_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill_normal(torch.empty(10, 100, dtype=torch.bfloat16), 7)
    monkeypatch.setitem(operands._CHUNK, "cpu", 77)
    assert torch.equal(fill_normal(torch.empty(10, 100, dtype=torch.bfloat16), 7), whole)
    units = fill_normal(torch.empty(4, dtype=torch.float64), 3) * 209.0  # sums of eight bytes, centred
    assert units.round().int().tolist() == [349, -46, -1, 66]
    monkeypatch.setattr(prefill, "_COUNTED_ELEMENTS", 1000)
    case = "context_chunk:dims=small;heads=2;q=[3];kv=[200];data=needle"
    first, second = (built(case).attention[0] for _ in range(2))
    assert torch.equal(first.k, second.k) and torch.equal(first.q, second.q)
    assert 0.9 < float(first.k.double().var()) < 1.1 and not torch.equal(first.k[..., :16], first.v)


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_not_a_number_and_a_fresh_buffer_is_full_of_it_and_unharmed(dtype: torch.dtype) -> None:
    tensor = memory.poison((3, 5), dtype, CPU)
    assert tensor.dtype == dtype and bool(tensor.float().isnan().all())
    buffer = Guarded.allocate((4, 2, 3), dtype, CPU)
    assert buffer.view.shape == (4, 2, 3) and bool(buffer.view.float().isnan().all())
    buffer.view.zero_()
    assert buffer.view.is_contiguous() and buffer.overrun() == 0
    buffer.view.as_strided((3,), (1,), buffer.view.storage_offset() - 3).zero_()
    assert buffer.overrun() == 3 * dtype.itemsize, "before it"


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError('torch_call_dispatcher( "aten::new_empty", "", stack.data(), 1) API call failed at ops.h'), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_errors(error: Exception, ran_out: bool) -> None:
    assert out_of_memory(error) is ran_out


def test_no_memory_to_merge_in_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "merge", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    record = judged("EAGER", "chunked_context:heads=2;q=[3];kv=[40];page=16;workspace=16")
    assert record.status is Status.UNAVAILABLE and "merging partial states" in record.message


def test_a_list_names_as_many_keys_as_the_row_sees_and_fit() -> None:
    text = "sparse_decode:dtype=fp32;dims=small;heads=2;q=[2,1,3];kv=[20,0,5];page=4;topk=8"
    call: Any = built(text).calls[0]
    assert (call.selected >= 0).sum(1).tolist() == [8, 8, 1, 6, 7, 8]
    for row, (first, bound) in enumerate([(0, 21), (0, 22), (22, 1), (23, 6), (23, 7), (23, 8)]):
        named = call.selected[row][call.selected[row] >= 0]
        assert len(set(named.tolist())) == len(named) and bool(((named >= first) & (named < first + bound)).all())


def test_a_copy_has_the_same_bytes_in_storages_of_its_own_that_are_shared_as_those_were() -> None:
    case = Case.parse("layer:q=[5,1];kv=[9,4];page=16;workspace=64;decodes=1;layers=2")
    built = build_problem(case, CPU)
    kept, copied = Original(built, [case]).copy(), Original(built).copy()
    assert kept.case is case and copied.case == case and copied.case is not case
    for mine, theirs in zip(kept.tensors(), built.tensors(), strict=True):
        assert (mine.stride(), mine.storage_offset()) == (theirs.stride(), theirs.storage_offset())
        assert same_bytes(storage_bytes(mine), storage_bytes(theirs))
        assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()

    whole = torch.arange(12.0).view(3, 4)
    one, view, same = Original((whole, whole[1:, ::2], whole)).copy()
    assert same is one and torch.equal(view, one[1:, ::2])
    one.zero_()
    assert not view.any() and whole.any()


def test_every_byte_is_compared_and_a_snapshot_tells_what_differs_of_what_it_kept_in_time() -> None:
    for size in (0, 1, 4096, 4097, 100_003):
        x = torch.arange(size).to(torch.uint8)
        assert same_bytes(x, x.clone())
        for place in {0, size // 2, size - 1} if size else ():
            other = x.clone()
            other[place] ^= 128
            assert not same_bytes(x, other)
    a, b, beside = torch.zeros(9), torch.zeros(5000), torch.zeros(3)
    snapshot = Snapshot({"a": a, "b": b, "rows of b": b[10:]})
    snapshot.keep([b, beside])
    b[4999], beside[0] = 1.0, 1.0
    assert snapshot.changed() == ["b", "rows of b"]
    b[4999] = 0.0
    snapshot.keep()
    a[0] = 1.0
    assert snapshot.changed() == ["a"]
