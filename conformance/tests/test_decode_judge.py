"""The judge of decode: ways of being wrong that no known defect has are caught by their check; honest kernels pass."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.cases.case import Call, Case
from mla_conformance.defects.honest_attention import HONEST_DECODES
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.tests.drawn import judged, little_work
from mla_conformance.vocabulary.capabilities import CAPABILITIES


class OneKeyTooFew(EagerDecodeBackend):
    def _visible(self, queries: int, request: int, seq_len: int, tile: slice) -> torch.Tensor:
        visible = super()._visible(queries, request, seq_len, tile)
        return visible & (torch.arange(tile.start, tile.stop) < seq_len - 1)


class ValueOfTheWholeEntry(EagerDecodeBackend):
    def _values(self, keys: torch.Tensor) -> torch.Tensor:
        return keys[..., -self.kv_lora_rank :]


class OneLengthForAll(EagerDecodeBackend):
    def _attend(
        self, q: torch.Tensor, request: int, seq_len: int, kv_cache: torch.Tensor, k_scale: torch.Tensor
    ) -> Any:
        return super()._attend(q, request, int(self._decode_metadata.seq_lens.min()), kv_cache, k_scale)


class Codes(EagerDecodeBackend):
    """EAGER, whose keys are changed after the entries of one layout were read."""

    layout = "fp8"

    def _dequantise(self, rows: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
        keys = super()._dequantise(rows, k_scale)
        return self.changed(keys, rows, k_scale) if self.kv_cache_dtype == self.layout else keys

    def changed(self, keys: torch.Tensor, rows: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
        return keys * k_scale


class ScalesValues(Codes):
    layout = "auto"


class KScaleForTiles(Codes):
    layout = "fp8_ds_mla"


class ScaledRope(KScaleForTiles):
    def changed(self, keys: torch.Tensor, rows: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
        scale = rows[:, 524:528].contiguous().view(torch.float32)
        return torch.cat((keys[:, :512], keys[:, 512:] * scale), dim=1)


WRONG: dict[type[EagerDecodeBackend], tuple[str, Check]] = {
    OneKeyTooFew: ("decode", Check.OUTPUT),
    ValueOfTheWholeEntry: ("decode", Check.OUTPUT),
    OneLengthForAll: ("decode", Check.OUTPUT),
    ScalesValues: ("decode", Check.OUTPUT),
    ScaledRope: ("kv_cache_fp8_ds_mla", Check.LSE),
    KScaleForTiles: ("kv_cache_fp8_ds_mla", Check.LSE),
}
"""The capability that kills each first, by its first three cases, and by which check; known defects are subtler."""


def decodes(capability: str) -> list[Case]:
    return [case for case in CAPABILITIES[capability].cases if case.call == Call.DECODE]


DECIDED = [name for name in CAPABILITIES if name in {capability for capability, _ in WRONG.values()}]
"""In the order of the vocabulary."""


@pytest.mark.parametrize("capability", DECIDED)
def test_a_capability_kills_its_wrong_kernels_and_none_that_is_for_a_later_one(capability: str) -> None:
    found: dict[type, Record] = {}
    later = DECIDED[DECIDED.index(capability) :]
    for case in decodes(capability)[:3]:
        for kernel in (kernel for kernel, (killer, _) in WRONG.items() if killer in later and kernel not in found):
            record = judged(kernel, case)
            if record.failed:
                found[kernel] = record
    expected = {kernel: check for kernel, (killer, check) in WRONG.items() if killer == capability}
    assert {kernel: record.check for kernel, record in found.items()} == expected, found


@pytest.mark.parametrize("kernel", ["EAGER", "TORCH_SDPA", "KeysOfTheModel", "StoredSplits"])
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(case=little_work("decode_combinations", heads=("1", "odd", "8")))
def test_honest_kernels_raise_no_alarm_on_drawn_cases(kernel: str, case: Case) -> None:
    kernels = {kernel.__name__: kernel for kernel in HONEST_DECODES}
    record = judged(kernels.get(kernel, kernel), case)
    assert record.status is Status.PASS, f"{case.id}: {record.message}"


EQUAL_ENTRIES = "decode:dims=small;heads=16;q=[6];kv=[2000];data=low_rank;cache=fp8;kscale=7"


class CoarseWeights(EagerDecodeBackend):
    """Rounds P as bf16 does, to two bits less."""

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mantissa, exponent = torch.frexp(p)
        return torch.ldexp((mantissa * 2**6).round() / 2**6, exponent)


class LosesAKey(EagerDecodeBackend):
    def _visible(self, queries: int, request: int, seq_len: int, tile: slice) -> torch.Tensor:
        return super()._visible(queries, request, seq_len, tile) & (torch.arange(tile.start, tile.stop) != 700)


@pytest.mark.parametrize(
    ("kernel", "check"), [("EAGER", ""), ("TORCH_SDPA", ""), (CoarseWeights, Check.OUTPUT), (LosesAKey, Check.LSE)]
)
def test_weights_of_equal_entries_are_rounded_alike_which_is_no_failure(kernel: Any, check: str) -> None:
    record = judged(kernel, EQUAL_ENTRIES)
    assert (record.status, record.check) == (Status.FAIL if check else Status.PASS, check), record.shares


class AsManyEach(EagerDecodeBackend):
    supports_nonuniform_queries = False


class WithoutLse(EagerDecodeBackend):
    returns_lse = False

    def run_decode(self, *operands: torch.Tensor) -> Any:
        return super().run_decode(*operands)[0]


@pytest.mark.parametrize(
    ("kernel", "case", "said"),
    [
        (
            AsManyEach,
            "decode:heads=1;q=[2];kv=[1];pad=3",
            "requests with different numbers of query tokens not supported",
        ),
        (AsManyEach, "decode:heads=1;q=[1];kv=[1];pad=3", ""),
        (WithoutLse, "decode:heads=1;q=[2];kv=[1]", "LSE not declared"),
        (WithoutLse, "dcp:call=decode;heads=1;q=[1];kv=[9];ranks=2;lse=0", "LSE not declared"),
        (WithoutLse, "decode:heads=1;q=[2];kv=[1];lse=0", ""),
        (WithoutLse, "refusals:call=decode;heads=1;q=[2];kv=[1]", "LSE not declared"),
    ],
)
def test_what_a_decode_does_not_declare_is_unsupported(kernel: type, case: str, said: str) -> None:
    record = judged(kernel, case)
    assert (record.status, record.message) == (Status.UNSUPPORTED if said else Status.PASS, said)


@pytest.mark.parametrize(("name", "said"), [("FLEX_ATTENTION", "prefill only"), (EagerDecodeBackend, "decode only")])
def test_a_backend_without_the_role_is_unsupported_even_where_refusals_are_asked_for(
    name: str | type, said: str
) -> None:
    capability = CAPABILITIES["refusals"]
    case = next(case for case in capability.cases if (case.call == Call.DECODE) == (said == "prefill only"))
    record = judged(name, case)
    assert (record.status, record.message) == (Status.UNSUPPORTED, said)
