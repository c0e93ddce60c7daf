"""Defects that need two ordinary facts together fail where both meet, and nowhere else."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.cases.case import Case, parse_fields
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import known_defects
from mla_conformance.judging.verdict import Status
from mla_conformance.tests.edges import CASES_THAT_SHOW
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

EDGES = {id: entry for id, entry in known_defects().items() if entry.family == "tiles" or "edge_" in entry.family}
CONTEXT = Context()


@cache
def status(kernel: type, case: Case) -> Status:
    subject = Subject.of(f"{kernel.__module__}:{kernel.__name__}", torch.device("cpu"))
    return judge_one(subject, case, CONTEXT).status


def test_every_defect_of_two_facts_has_a_case() -> None:
    assert CASES_THAT_SHOW.keys() == EDGES.keys()


@pytest.mark.parametrize("id", EDGES)
def test_a_defect_of_two_facts_fails_where_both_meet_and_not_where_one_stands_alone(id: str) -> None:
    edge, kernel = CASES_THAT_SHOW[id], EDGES[id].kernel
    case = Case.parse(f"{EDGES[id].killed_by}:{edge.case}")
    honest = next(each for each in kernel.__mro__ if each in (*HONEST, EagerDecodeBackend))
    assert (status(kernel, case), status(honest, case)) == (Status.FAIL, Status.PASS)
    for fields in edge.apart:
        assert status(kernel, replace(case, **parse_fields(fields))) is Status.PASS, fields
