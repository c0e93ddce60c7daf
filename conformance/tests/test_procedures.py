"""Procedures: what the capabilities name exists, and nothing exists that none of them names; honest kernels pass."""

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import golden_attention
from mla_conformance.judging.verdict import Status
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.procedures import PROCEDURES
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.transform import scale_cache
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CPU = torch.device("cpu")
SMALL = "call=decode;dims=small;heads=2;q=[1,1];kv=[130,40]"


def test_the_capabilities_name_every_procedure_and_no_other() -> None:
    assert {capability.procedure for capability in CAPABILITIES.values()} == PROCEDURES.keys()


@pytest.mark.parametrize(
    "text",
    [
        "call_order:dims=small;heads=2;q=[5,33]",
        "call_order:call=chunked_context;dims=small;heads=2;q=[5,3];kv=[40,70];workspace=128",
        *(f"call_order:{SMALL}{further}" for further in ("", ";cache=fp8", ";ranks=2", ";cache=fp8;ranks=2")),
        "request_order:dims=small;heads=2;q=[5,9,1,3,2]",
        "batch_invariance:call=decode;dims=small;heads=2;q=[1x4];kv=[40,5,70,9]",
    ],
)
def test_an_honest_kernel_passes(text: str) -> None:
    found = judge_one(Subject.of("EAGER", CPU), Case.parse(text), Context())
    assert (found.status, found.message) == (Status.PASS, "")


def test_only_codes_know_the_scale_of_a_cache() -> None:
    for further, same in (("", True), (";cache=fp8", False)):
        problem = build_problem(Case.parse(f"call_order:{SMALL}{further}"), CPU)
        other = scale_cache(problem, 2.0)
        before, after = (golden_attention(each).calls[0].lse for each in (problem, other))
        assert torch.equal(before, after) is same and problem.key != other.key
