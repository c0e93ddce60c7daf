"""The judge of decode: ways of being wrong that no known defect has are caught by their check; honest kernels pass."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.cases.case import Call, Case
from mla_conformance.defects import honest_attention
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.tests.drawn import judged, little_work
from mla_conformance.vocabulary.capabilities import CAPABILITIES


@pytest.mark.parametrize("kernel", ["EAGER", "TORCH_SDPA", "KeysOfTheModel", "StoredSplits"])
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(case=little_work("decode_combinations", heads=("1", "odd", "8")))
def test_honest_kernels_raise_no_alarm_on_drawn_cases(kernel: str, case: Case) -> None:
    record = judged(vars(honest_attention).get(kernel, kernel), case)
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


UNEVEN = "requests with different numbers of query tokens not supported"


class AsManyEach(EagerDecodeBackend):
    supports_nonuniform_queries = False


class WithoutLse(EagerDecodeBackend):
    returns_lse = False

    def run_decode(self, *operands: torch.Tensor) -> Any:
        return super().run_decode(*operands)[0]


@pytest.mark.parametrize(
    ("kernel", "case", "said"),
    [
        (AsManyEach, "decode:heads=1;q=[2];kv=[1];pad=3", UNEVEN),
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
