"""A selection over pools of tokens: which lists are right, and who is asked."""

from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.topk import MLATopKBackend
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.defects.known import known_defects
from mla_conformance.judging.verdict import Status
from mla_conformance.roles.topk.case import TopKCase
from mla_conformance.roles.topk.role import PoolTokens
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

CASE = "pooled_topk:call=select;q=[1,1];kv=[11,43];topk=16;pool=4;tail=1"


class NoPools(MLATopKBackend):
    """It selects columns alone."""

    supports_row_starts: ClassVar[bool] = False

    @staticmethod
    def get_name() -> str:
        return "NO_POOLS"

    def run_top_k_per_row(self, logits: Any, topk_tokens: int) -> Any:
        raise AssertionError("nothing is asked of it")


def named(*tokens: int, seen: int = 11, tail: bool = True) -> list[str]:
    """What is wrong with a row that sees 11 tokens in pools of 4."""
    numbers = torch.tensor([[*tokens, *[-1] * (15 - len(tokens))]])
    judged = PoolTokens(numbers, torch.tensor([seen]), 4, tail)
    return [reason(0) for reason, wrong in judged.wrong() if bool(wrong.any())]


def test_whole_pools_and_the_tail_are_right_in_any_order() -> None:
    assert named(10, 3, 0, 2, 8, 1, -1, 9) == []
    assert named(0, 1, 2, 3, tail=False) == []
    assert named(seen=0) == []


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ((0, 1, 2, 3, 8, 9, 10, 11), "11 is no token that it sees"),
        ((0, 1, 2, 3, 8, 9, 10, -2), "-2 is no token that it sees"),
        ((0, 1, 2, 3, 3, 8, 9, 10), "token 3 is named twice"),
        ((0, 1, 2, 3, 8, 9), "2 tokens of the last pool are named, expected 3"),
        ((4, 5, 6, 8, 9, 10), "not all tokens of pool 1 are named"),
    ],
)
def test_what_is_wrong_is_told(tokens: tuple[int, ...], said: str) -> None:
    assert said in named(*tokens)


def test_a_tail_that_nobody_asked_for_is_told() -> None:
    assert named(0, 1, 2, 3, 8, tail=False) == ["1 tokens of the last pool are named, expected 0"]


def test_pools_are_told_by_number() -> None:
    numbers = torch.tensor([[10, 3, 0, 2, 8, 1, 9, 4, -1]])
    assert PoolTokens(numbers, torch.tensor([11]), 4, True).positions(3).tolist() == [[0, -1, -1]]


def test_columns_count_whole_pools_and_rows_tokens() -> None:
    case = Case.parse("pooled_topk:call=select;q=[6,1];kv=[3,9];topk=8;pool=4;packed=1")
    assert isinstance(case, TopKCase)
    assert case.tokens == (3, 4, 5, 6, 7, 8, 9) and case.lengths == (0, 1, 1, 1, 1, 2, 2)
    assert case.spans == (2, 2) and case.width == 4


@pytest.mark.parametrize(("kernel", "expected"), [(EagerTopKBackend, Status.PASS), (NoPools, Status.UNSUPPORTED)])
def test_who_does_not_declare_pools_is_not_asked(kernel: type, expected: Status) -> None:
    record = judge_one(
        Subject.of(f"{kernel.__module__}:{kernel.__name__}", torch.device("cpu")), Case.parse(CASE), Context()
    )
    assert record.status is expected


def test_a_better_pool_that_is_left_out_is_told() -> None:
    subject = Subject.of(known_defects()["pools-as-many-as-tokens"].reference, torch.device("cpu"))
    record = judge_one(subject, Case.parse(CASE), Context())
    assert "top-k of pools: 1 tokens are selected, expected 2 of 2" in record.message


@pytest.mark.parametrize("fields", ["topk=10;pool=4", "topk=8;tail=1"])
def test_a_case_selects_whole_pools(fields: str) -> None:
    with pytest.raises(CaseError, match="expected whole pools"):
        Case.parse(f"pooled_topk:call=select;q=[1];kv=[40];{fields}")
