"""Procedures: refusals leave no trace, and what outlives a call, a step or a batch is found."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.cases.case import Case
from mla_conformance.defects.known import known_defects
from mla_conformance.judging.record import Check, Status
from mla_conformance.tests.drawn import CONTEXT, changed, judged, subject_of
from mla_conformance.trials.graph import captured_batch, replayed_batch
from mla_conformance.trials.trial import PROCEDURES, judged_trial
from mla_conformance.vocabulary.capabilities import CAPABILITIES


class DeniesFloat16(EagerPrefillBackend):
    """Declares fp16 unsupported; what it does with it is in the subclasses."""

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        return ["no fp16"] if selector_config.dtype == torch.float16 else []


class RunsItWrongly(DeniesFloat16):
    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output, lse = super().run_prefill_new_tokens(*args, **kwargs)
        return output * 2, lse


class RefusesLate(DeniesFloat16):
    def run_prefill_new_tokens(self, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        q.zero_()
        raise ValueError("no fp16")


RefusesAtOnce = changed(DeniesFloat16, __init__=Mock(side_effect=ValueError("no fp16")))

LEAVES_ITS_DTYPE = known_defects()["refusal-leaves-the-default-dtype"].kernel
FP16, FP64 = "refusals:dims=small;heads=2;q=[9];dtype=fp16", "refusals:dims=small;heads=2;q=[9];dtype=fp64;out=1;lse=0"


@pytest.mark.parametrize(
    ("backend", "text", "check", "said"),
    [
        ("EAGER", FP64, "", "refused: "),
        (RefusesAtOnce, FP16, "", "refused: ValueError: no fp16"),
        (DeniesFloat16, FP16, Check.UNDECLARED_SUPPORT, "(no fp16), but it ran and returned a right result"),
        (RunsItWrongly, FP16, Check.UNSAFE_REFUSAL, "(no fp16), but it ran and returned a wrong result"),
        (RefusesLate, FP16, Check.UNSAFE_REFUSAL, "(no fp16), but changed q of new tokens"),
        (LEAVES_ITS_DTYPE, FP64, Check.PROCESS_STATE, "changed the process: default dtype from torch.float32"),
    ],
)
def test_a_refusal_must_be_real_and_leave_no_traces(backend: type | str, text: str, check: str, said: str) -> None:
    trial, found = judged_trial(subject_of(backend), Case.parse(text), CONTEXT)
    assert (found.status, found.check) == (Status.FAIL if check else Status.PASS, check)
    assert said in found.message and found.message.endswith(f"(SPEC {found.clause})") == bool(check)
    assert trial.disturbed == (check == Check.PROCESS_STATE) and torch.get_default_dtype() is torch.float32


def test_inputs_that_cannot_be_built_are_no_refusal_and_procedures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mla_conformance.trials.trial.build_problem")
    record = judged(RefusesAtOnce, f"{FP16};seed=9")
    assert record.status is Status.HARNESS_ERROR and "build_problem" in record.message
    assert {capability.procedure for capability in CAPABILITIES.values()} == PROCEDURES.keys()


SELECT = "call=select;q=[1,1];kv=[9,4];topk=4"
WRITES = "call=write_latent;dims=16-8-16-32;q=[3,1];kv=[9,4];page=16"
STEP = "call=decode;dims=small;heads=1;q=[1,1];kv=[9,4];page=64"


def kept_by_address(kernel: Any, tensor: Tensor) -> Tensor:
    """A copy that is made once for each address and shape; the tensor is kept, so that no other has its address."""
    known = kernel.__dict__.setdefault("known", {})
    kept: Tensor = known.setdefault((tensor.data_ptr(), tensor.shape), (tensor, tensor.clone()))[1]
    return kept


class LengthsByAddress(EagerTopKBackend):
    def prepare_metadata(self, topk_metadata: Any) -> None:
        lengths = kept_by_address(self, topk_metadata.lengths)
        super().prepare_metadata(replace(topk_metadata, lengths=lengths))


def slots_by_address(run: Any, *, slot_mapping: Tensor, **others: Tensor) -> None:
    run(slot_mapping=kept_by_address(run.args[0], slot_mapping), **others)


SLOTS_BY_ADDRESS = changed(EagerCacheBackend, run_write_latent=slots_by_address)


def slots_of_the_first(run: Any, *, slot_mapping: Tensor, **others: Tensor) -> None:
    run(slot_mapping=slot_mapping.flip(0), **others)


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
        (SLOTS_BY_ADDRESS, f"call_order:{WRITES}", "step 0: the same requests, 0 tokens on"),
        (StatesByAddress, "call_order:call=compress;dims=8-8-16-16;q=[5,1,4];kv=[7,3,0];page=4", "step "),
        (PlansOf128Batches, f"many_batches:{STEP}", "batch "),
    ],
)
def test_what_an_earlier_call_left_is_found_and_the_call_alone_is_right(kernel: type, text: str, behind: str) -> None:
    record = judged(kernel, text)
    assert record.status is Status.FAIL
    assert f" of this instance, behind “{behind}" in record.message
    assert f"; on a new instance it is right (SPEC {record.clause})" in record.message


def test_a_wrong_call_alone_is_told_and_equal_calls_have_equal_bits() -> None:
    kernel = changed(EagerCacheBackend, run_write_latent=slots_of_the_first)
    first = judged(kernel, f"call_order:{WRITES}")
    assert first.check == Check.WRITTEN and "new instance" not in first.message
    assert "; on a new instance it is wrong as well" in judged(OnlyNine, f"call_order:{SELECT}").message
    record = judged(OrderOfTheFirst, f"many_batches:{SELECT};data=ones")
    assert record.check is Check.NONDETERMINISM
    assert "has other bits than the same call of a new one" in record.message


class OnlyNine(EagerTopKBackend):
    """Columns from the tenth on are not seen."""

    def _windows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        starts, lengths = super()._windows(logits)
        return starts, lengths.clamp(max=10)


DECODE = Case.parse("cuda_graph:call=decode;q=[1x8];kv=[2000,64,300,129,17,1000,40,5];page=64")


def test_rows_of_replays_grow_shrink_stay_and_have_no_context_or_one_token_of_it() -> None:
    first, replays = captured_batch(DECODE).kv, [replayed_batch(DECODE, 8, seed).kv for seed in range(2, 40)]
    for lengths in replays:
        pairs = list(zip(lengths, first, strict=True))
        assert {0, 1} <= set(lengths) and any(now == then for now, then in pairs)
        assert sum(lengths) <= sum(DECODE.kv)
    assert all(min(row) < then < max(row) for *row, then in zip(*replays, first, strict=True))
    assert len(set(replays)) == len(replays)
