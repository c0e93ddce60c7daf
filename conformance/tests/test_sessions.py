"""Sessions: what outlives a call, a step or a hundred batches is found, and that the call alone is right is said."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.cases.case import Case
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.fences import Buffers, MovedCall
from mla_conformance.roles.table import build_problem
from mla_conformance.tests.drawn import CPU, judged
from mla_conformance.trials.session import _small_batches, _steps_of_an_engine

SELECT = "call=select;q=[1,1];kv=[9,4];topk=4"
WRITES = "call=write_latent;dims=16-8-16-32;q=[3,1];kv=[9,4];page=16"
DECODE = "call=decode;dims=small;heads=1;q=[1,1];kv=[9,4];page=64"


def kept_by_address(kernel: Any, tensor: Tensor) -> Tensor:
    """A copy that is made once for each address and shape; the tensor is kept, so that no other has its address."""
    known = kernel.__dict__.setdefault("known", {})
    kept: Tensor = known.setdefault((tensor.data_ptr(), tensor.shape), (tensor, tensor.clone()))[1]
    return kept


class LengthsByAddress(EagerTopKBackend):
    def prepare_metadata(self, topk_metadata: Any) -> None:
        lengths = kept_by_address(self, topk_metadata.lengths)
        super().prepare_metadata(replace(topk_metadata, lengths=lengths))


class SlotsByAddress(EagerCacheBackend):
    def run_write_latent(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        super().run_write_latent(kv_c, k_pe, kv_cache, kept_by_address(self, slot_mapping), k_scale)


class StatesByAddress(EagerCompressBackend):
    def prepare_metadata(self, compress_metadata: Any) -> None:
        table = kept_by_address(self, compress_metadata.state_block_table)
        super().prepare_metadata(replace(compress_metadata, state_block_table=table))


class PlansOf128Batches(EagerDecodeBackend):
    """A table of 128 plans; what comes when it is full overwrites the first one, which keeps its name."""

    def prepare_metadata(self, decode_metadata: Any) -> None:
        numbers, plans = self.__dict__.setdefault("numbers", {}), self.__dict__.setdefault("plans", [])
        name = tuple(decode_metadata.seq_lens.tolist())
        if name not in numbers:
            numbers[name] = len(plans) if len(plans) < 128 else 0
            plans[numbers[name] :] = [decode_metadata.seq_lens.clone(), *plans[numbers[name] + 1 :]]
        self.plan = plans[numbers[name]]
        super().prepare_metadata(decode_metadata)

    def _attend(self, q: Tensor, request: int, seq_len: int, kv_cache: Tensor, k_scale: Tensor) -> Any:
        planned = int(self.plan[request]) if request < len(self.plan) else 0
        return super()._attend(q, request, min(seq_len, planned), kv_cache, k_scale)


class OrderOfTheFirst(EagerTopKBackend):
    """Equals are broken one way in the first hundred calls and the other way later; either is right, once."""

    def _choose(self, keys: Tensor, topk_tokens: int) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls < 100:
            return super()._choose(keys, topk_tokens)
        chosen = super()._choose(keys.flip(1), topk_tokens)
        return torch.where(chosen < 0, chosen, keys.shape[1] - 1 - chosen)


@pytest.mark.parametrize(
    ("kernel", "text", "behind"),
    [
        (LengthsByAddress, f"call_order:{SELECT}", "step 0: the same requests, 0 tokens on"),
        (SlotsByAddress, f"call_order:{WRITES}", "step 0: the same requests, 0 tokens on"),
        (StatesByAddress, "call_order:call=compress;dims=8-8-16-16;q=[5,1,4];kv=[7,3,0];page=4", "step "),
        (PlansOf128Batches, f"many_batches:{DECODE}", "batch "),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_an_earlier_call_left_is_found_and_the_call_alone_is_right(kernel: type, text: str, behind: str) -> None:
    record = judged(kernel, text)
    assert record.status is Status.FAIL
    assert f" of this instance, behind “{behind}" in record.message
    assert f"; on a new instance it is right (SPEC {record.clause})" in record.message


def test_a_wrong_first_call_has_nothing_before_it_and_a_later_one_is_told_from_one_that_is_wrong_alone() -> None:
    assert "new instance" not in judged(SlotsOfTheFirst, f"call_order:{WRITES}").message
    assert "; on a new instance it is wrong as well" in judged(OnlyNine, f"call_order:{SELECT}").message


class SlotsOfTheFirst(EagerCacheBackend):
    def run_write_latent(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        super().run_write_latent(kv_c, k_pe, kv_cache, slot_mapping.flip(0), k_scale)


class OnlyNine(EagerTopKBackend):
    """Columns from the tenth on are not seen."""

    def _windows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        starts, lengths = super()._windows(logits)
        return starts, lengths.clamp(max=10)


def test_equal_calls_have_equal_bits_whatever_came_between() -> None:
    record = judged(OrderOfTheFirst, f"many_batches:{SELECT};data=ones")
    assert record.check is Check.NONDETERMINISM
    assert "has other bits than the same call of a new one" in record.message


@pytest.mark.parametrize("text", [SELECT, WRITES, DECODE])
def test_no_two_batches_between_are_alike_and_there_are_more_than_128(text: str) -> None:
    case = Case.parse(f"many_batches:{text}")
    batches = list(_small_batches(case))
    longest = [max(batch.kv) for batch in batches]
    assert (
        len(batches) > 128 and longest == sorted(set(longest)) and {len(batch.q) for batch in batches} == {*range(1, 6)}
    )


def test_a_step_has_the_requests_of_the_one_before_in_the_same_pages_and_buffers() -> None:
    case = Case.parse(f"call_order:{DECODE}")
    buffers, seen = Buffers(), []
    for later, step in _steps_of_an_engine(case):
        call: Any = MovedCall(buffers, build_problem(later, CPU).calls[0], None).call
        seen.append((step, call.kv_cache.data_ptr(), call.metadata.block_table.clone()))
        assert call.metadata.seq_lens.untyped_storage().nbytes() == 4 * len(later.q)
    assert len({address for _, address, _ in seen}) == 1
    (_, _, first), (_, _, second), *rest = seen
    assert torch.equal(first, second)
    assert any(step.startswith("step 60:") for step, _, _ in rest), "a step onto the next page"
