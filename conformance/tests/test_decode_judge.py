"""The judge of decode: wrong in ways that no known defect has; honest kernels pass; and who sees whom in a tree."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from mla_conformance.backends.eager_decode import EagerDecodeBackend, EagerTreeBackend
from mla_conformance.backends.tree import MLATreeMetadata
from mla_conformance.cases.case import Call, Case
from mla_conformance.defects import honest_attention
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.calls import attention_call
from mla_conformance.roles.table import build_problem, golden_of
from mla_conformance.roles.tree.case import TREES
from mla_conformance.roles.tree.problem import TreeBatch
from mla_conformance.tests.drawn import CPU, judged, little_work
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


MIXED = "tree_decode:dims=small;heads=2;q=[9,1,12,7];kv=[5,17,0,64];tree=random+chain+binary+star"


def batch_of(text: str) -> TreeBatch:
    case: Any = Case.parse(text)
    return TreeBatch(case, CPU)


def golden(text: str) -> Any:
    found: Any = golden_of(build_problem(Case.parse(text), CPU))
    return found.calls


def test_a_row_sees_the_context_itself_and_its_ancestors() -> None:
    """By the definition, key by key."""
    batch = batch_of(MIXED)
    (call,), rows, (state,) = batch.calls(), iter(range(29)), golden(MIXED)
    keys, scale = call.k[:, 0].double(), batch.case.softmax_scale
    for first, context, parents in zip(call.key_start_loc, batch.case.kv, batch.parents(), strict=False):
        for token, row in zip(range(len(parents)), rows, strict=False):
            seen = {*range(context), context + token}
            while token:
                token = parents[token]
                seen.add(context + token)
            own = keys[[first + number for number in seen]]
            scores = scale * call.q[row].double() @ own.mT
            assert torch.allclose(state.lse[:, row], scores.logsumexp(-1), rtol=1e-12)
            assert torch.allclose(state.output[row], scores.softmax(-1) @ own[:, :32], rtol=1e-9, atol=1e-12)


def test_random_trees_have_siblings_and_early_ends_and_each_request_its_own() -> None:
    text = "tree_decode:q=[40,40,40];kv=[0,0,0]"
    trees = batch_of(text).parents()
    assert len(set(map(tuple, trees))) == 3 and trees == batch_of(text).parents()
    for parents in trees:
        drafted = [parents[1:].count(token) for token in range(40)]
        assert max(drafted) > 1 and 5 < drafted.count(0) < 35
    others = [batch_of(f"tree_decode:q=[5];kv=[0];tree={tree}").parents()[0] for tree in TREES[1:]]
    assert others == [[0, 0, 1, 2, 3], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]


def test_requests_in_another_order_keep_their_trees() -> None:
    (call,) = batch_of(MIXED).calls()
    other = attention_call(call.regrouped(None, [2, 0], None))
    assert [mask.tolist() for mask in other.masks] == [call.masks[request].tolist() for request in (2, 0)]
    assert other.metadata.tree_mask_start_loc.tolist() == [0, 144, 225]
    regrouped = MIXED.replace("tree_decode:", "batch_invariance:call=tree_decode;")
    assert judged(EagerTreeBackend, regrouped).status is Status.PASS


def test_a_tree_of_ones_own_and_rows_of_padding() -> None:
    (call,) = batch_of("tree_decode:q=[4];kv=[9];parents=[0,0,0,1]").calls()
    assert call.masks[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert judged(EagerTreeBackend, "tree_decode:heads=2;q=[1,1];kv=[9,3];pad=2;parents=[0,0]").status is Status.PASS
    (state,) = golden("tree_decode:heads=2;q=[1,1];kv=[9,3];pad=2")
    assert state.lse[:, 2:].eq(-math.inf).all() and not state.output[2:].any()


def test_masks_of_another_width_are_refused() -> None:
    (call,) = batch_of("tree_decode:dims=small;heads=2;q=[3,2];kv=[9,0]").calls()
    backend = EagerTreeBackend(2, 1.0, 32, 16, 8, 16, "auto", None)
    backend.prepare_metadata(MLATreeMetadata(**vars(call.metadata) | {"tree_mask": call.metadata.tree_mask[:-1]}))
    with pytest.raises(ValueError, match=r"tree_mask: expected \[13\] of torch.bool, .*, got \[12\]"):
        backend.run_tree_decode(call.ql_nope, call.q_pe, call.kv_cache, call.k_scale)
