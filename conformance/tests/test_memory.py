"""Memory under watch: poison that no kernel can mistake for data, and guards that notice every byte."""

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving import driver
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.memory import Guarded, Snapshot, out_of_memory, poison, storage_bytes
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_not_a_number_and_a_fresh_buffer_is_full_of_it_and_unharmed(dtype: torch.dtype) -> None:
    tensor = poison((3, 5), dtype, CPU)
    assert tensor.dtype == dtype and bool(tensor.float().isnan().all())
    buffer = Guarded.allocate((4, 2, 3), dtype, CPU)
    assert buffer.view.shape == (4, 2, 3) and bool(buffer.view.float().isnan().all())
    buffer.view.zero_()
    assert buffer.view.is_contiguous() and buffer.overrun() == 0


@pytest.mark.parametrize("position", [-1024, -1, 24, 24 + 1023])
def test_a_write_outside_is_counted_on_either_side(position: int) -> None:
    buffer = Guarded.allocate((4, 2, 3), torch.bfloat16, CPU)
    beyond = buffer.view.as_strided((1,), (1,), buffer.view.storage_offset() + position)
    beyond.fill_(0.0)
    assert buffer.overrun() == 2
    assert Guarded.allocate((0, 2, 3), torch.float32, CPU).overrun() == 0


def test_a_snapshot_notices_a_write_outside_the_view() -> None:
    wide = torch.zeros(4, 10)
    before = Snapshot({"view": wide[:, 2:5], "other": torch.zeros(3)})
    assert before.changed() == []
    wide[3, 9] = 1.0
    assert before.changed() == ["view"]
    # Bytes and not values.
    tensor = torch.tensor([0.0, float("nan")])
    before = Snapshot({"x": tensor})
    assert before.changed() == []
    tensor[0] = -0.0
    assert before.changed() == ["x"]


def test_storage_bytes_is_the_memory_itself() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.float16)
    storage_bytes(tensor[1:]).fill_(0xFF)
    assert storage_bytes(tensor).numel() == 12 and bool(tensor.isnan().all())


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_errors(error: Exception, ran_out: bool) -> None:
    assert out_of_memory(error) is ran_out


def test_no_memory_to_merge_in_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(driver, "merge", full)
    case = Case.parse("chunked_context:heads=2;q=[3];kv=[40];page=16;workspace=16")
    record = judge_one(Subject.of("EAGER", torch.device("cpu")), case, Context())
    assert record.status is Status.UNAVAILABLE and "merging partial states" in record.message
