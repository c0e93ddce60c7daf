"""The judges of decode, of an indexer, a top-k and a preparation: what is wrong by one thing, and honest kernels."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.backends import loading, references
from mla_conformance.backends.declaration import Declaration, SelectionForm, SelectionOrder, Ties
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.cases.case import Case
from mla_conformance.defects import honest_attention
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.record import Check, Status, Verdict
from mla_conformance.problems.calls import Problem
from mla_conformance.roles.definition import DEFINITIONS, build_problem, golden_of, judge
from mla_conformance.roles.indexer.problem import golden_scores
from mla_conformance.roles.topk.problem import PoolTokens
from mla_conformance.tests.drawn import judged, little_work

CPU = torch.device("cpu")
TOPK = "indexer_topk:call=index_topk;heads=4;q=[2,1];kv=[20,3];topk=8"


def built(text: str) -> tuple[Problem, Any, torch.Tensor]:
    problem = build_problem(Case.parse(text), CPU)
    golden = golden_scores(problem).scores
    best = golden.scores.topk(8, dim=1)
    return problem, golden, best.indices.masked_fill(best.values == -torch.inf, -1).int()


def verdict(problem: Problem, value: Any, declaration: Declaration | None = None) -> Verdict:
    observation = Observation((Returned(value, call=problem.calls[0]),), None, ())
    return judge(problem, golden_of(problem), observation, declaration or Declaration())


def test_the_order_of_a_selection_and_ties_are_free() -> None:
    problem, _, best = built(TOPK)
    assert verdict(problem, best).status is verdict(problem, best.flip(1)).status is Status.PASS
    problem, golden, _ = built(f"{TOPK};data=zero_keys")
    order = golden.visible.sum(dim=1, keepdim=True) - 1 - torch.arange(8)
    assert verdict(problem, order.clamp(min=-1).int()).status is Status.PASS
    problem, best = returned_of("select:q=[1];kv=[30];topk=4;data=ones")
    assert verdict(problem, best.new_tensor([[29, 3, 8, 0]])).status is Status.PASS


def test_scores_count_below_the_bound_alone_and_codes_that_are_nan_are_wrong() -> None:
    problem, golden, _ = built("indexer_logits:call=index_logits;heads=4;q=[2,1];kv=[20,3];inflate=2")
    logits = torch.full(problem.calls[0].result_shape, torch.nan)
    logits[:, : golden.scores.shape[1]] = golden.scores.float().nan_to_num(neginf=torch.nan)
    assert logits.shape == (3, 44)
    assert verdict(problem, logits).status is Status.PASS
    assert verdict(problem, logits[:, :-1]).check is Check.SHAPE
    assert verdict(problem, logits.double()).check is Check.DTYPE
    problem, (q, k, k_scale, weights) = returned_of("prepare_index:q=[2,1];kv=[5,0];heads=4")
    wrong = verdict(problem, (q, torch.full_like(k.float(), torch.nan).to(k.dtype), k_scale, weights))
    assert wrong.check is Check.PREPARED and "code of keys is NaN" in wrong.message, wrong.message
    assert verdict(problem, (q, k, k_scale)).check is Check.SHAPE


def returned_of(text: str) -> tuple[Problem, Any]:
    case = Case.parse(text)
    problem = build_problem(case, CPU)
    kernel = DEFINITIONS[case.role].kernel(
        loading.resolve_backend(references.parse_reference("EAGER"), None, case.role), case, torch.bfloat16, CPU
    )
    (call,) = problem.calls
    call.prepare(kernel)
    return problem, call.invoke(kernel, None)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"order": SelectionOrder.ASCENDING}, "not in ascending order, which is declared"),
        ({"order": SelectionOrder.DESCENDING}, "not in descending order, which is declared"),
        ({"ties": Ties.FIRST}, "of equal logits not the first are taken"),
        ({"ties": Ties.LAST}, "of equal logits not the last are taken"),
        ({"relative": False}, "is no token of the request"),
    ],
)
def test_what_is_declared_of_a_selection_holds(declared: dict[str, Any], said: str) -> None:
    values = torch.tensor([[2.0, 1.0, 1.0, 1.0, 3.0, 0.0]])
    problem, best = returned_of("select:q=[1,1];kv=[2,6];topk=3;packed=1")
    problem.calls[0].q[1, 2:] = values
    best[1] = best.new_tensor([0, 4, 2])
    assert verdict(problem, best).status is Status.PASS
    wrong = verdict(problem, best, Declaration(selection=SelectionForm(**declared)))
    assert wrong.check is Check.SELECTION and said in wrong.message, wrong.message


@pytest.mark.parametrize(
    ("tokens", "tail", "said"),
    [
        ((10, 3, 0, 2, 8, 1, -1, 9), True, []),
        ((0, 1, 2, 3), False, []),
        ((0, 1, 2, 3, 8, 9, 10, 11), True, ["11 is no token that it sees"]),
        ((0, 1, 2, 3, 8, 9, 10, -2), True, ["-2 is no token that it sees"]),
        ((0, 1, 2, 3, 3, 8, 9, 10), True, ["token 3 is named twice"]),
        ((0, 1, 2, 3, 8, 9), True, ["2 tokens of the last pool are named, expected 3"]),
        ((0, 1, 2, 3, 8), False, ["1 tokens of the last pool are named, expected 0"]),
        ((4, 5, 6, 8, 9, 10), True, ["not all tokens of pool 1 are named"]),
    ],
)
def test_whole_pools_and_the_tail_are_right_in_any_order(tokens: tuple[int, ...], tail: bool, said: list[str]) -> None:
    """Of a row that sees 11 tokens in pools of 4."""
    selected = PoolTokens(torch.tensor([[*tokens, *[-1] * (15 - len(tokens))]]), torch.tensor([11]), 4, tail)
    found = [reason(0) for reason, wrong in selected.wrong() if bool(wrong.any())]
    assert set(said) <= set(found) and bool(found) == bool(said)


DRAWN: list[tuple[str | type, str]] = [
    *product(("EAGER", "TORCH_SDPA"), ("combinations", "decode_combinations")),
    *((vars(honest_attention)[name], "decode_combinations") for name in ("KeysOfTheModel", "StoredSplits")),
    (EagerLayer, "layer_combinations"),
]
MAY_REFUSE = (("TORCH_SDPA", "combinations"), (EagerLayer, "layer_combinations"))


@pytest.mark.parametrize(("kernel", "capability"), DRAWN)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_honest_kernels_raise_no_alarm_on_drawn_cases(kernel: str | type, capability: str, data: st.DataObject) -> None:
    case = data.draw(little_work(capability, heads=("1", "odd", "8")))
    record, refuses = judged(kernel, case), (kernel, capability) in MAY_REFUSE
    assert record.status is Status.PASS or (refuses and record.status is Status.UNSUPPORTED), record.message


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
    record = judged(kernel, "decode:dims=small;heads=16;q=[6];kv=[2000];data=low_rank;cache=fp8;kscale=7")
    assert (record.status, record.check) == (Status.FAIL if check else Status.PASS, check), record.shares


UNEVEN = "requests with different numbers of query tokens not supported"

AsManyEach = type("AsManyEach", (EagerDecodeBackend,), {"supports_nonuniform_queries": False})


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
        ("FLEX_ATTENTION", "refusals:call=decode;heads=1;q=[2];kv=[1]", "prefill only"),
        (EagerDecodeBackend, "refusals:heads=1;q=[2]", "decode only"),
    ],
)
def test_what_a_decode_does_not_declare_is_unsupported(kernel: type | str, case: str, said: str) -> None:
    record = judged(kernel, case)
    assert (record.status, record.message) == (Status.UNSUPPORTED if said else Status.PASS, said)
