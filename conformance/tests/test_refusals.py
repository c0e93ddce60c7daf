"""Refusals: a backend that rejects a configuration must raise, write nothing and leave the process as it was."""

import inspect
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import run_calls
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
CONTEXT = Context()
REFUSED = "refusals:dims=small;heads=2;q=[9];dtype=fp64;out=1;lse=0"


class WritesOneRow(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["out"][0] = 0.0
        return super().run_prefill_new_tokens(*args, **kwargs)


class LeavesItsDtype(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().run_prefill_new_tokens(*args, **kwargs)


class LeavesItsDtypeAtOnce(EagerPrefillBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.set_default_dtype(torch.float64)
        raise ValueError("no float64")


@pytest.mark.parametrize(
    ("backend", "check", "said", "disturbed"),
    [
        (WritesOneRow, Check.UNSAFE_REFUSAL, "wrote 256 bytes of or around out= before it raised", False),
        (LeavesItsDtype, Check.PROCESS_STATE, "changed the process: default dtype from torch.float32", True),
        (LeavesItsDtypeAtOnce, Check.PROCESS_STATE, "changed the process: default dtype from torch.float32", True),
    ],
)
def test_a_refusal_that_leaves_traces_is_none(backend: type, check: Check, said: str, disturbed: bool) -> None:
    subject = Subject.of(f"{inspect.getfile(backend)}:{backend.__name__}", CPU)
    trial, found = judged_trial(subject, Case.parse(REFUSED), CONTEXT)
    assert (found.status, found.check, trial.disturbed) == (Status.FAIL, check, disturbed)
    assert said in found.message and torch.get_default_dtype() is torch.float32


def test_a_refusal_that_leaves_none_passes() -> None:
    trial, found = judged_trial(Subject.of("EAGER", CPU), Case.parse(REFUSED), CONTEXT)
    assert found.status is Status.PASS and found.message.startswith("refused: ")
    assert not trial.disturbed


def test_merging_in_place_leaves_the_results_of_the_calls() -> None:
    case = Case.parse("merge_states:call=chunked_context;dims=small;heads=2;q=[5,3];kv=[40,130];workspace=64;merge=own")
    backend = Subject.of("EAGER", CPU).create(case)
    fresh, in_place = (
        run_calls(backend, build_problem(Case.parse(case.id.replace("merge=own", merge)), CPU))
        for merge in ("merge=own", "merge=in_place")
    )
    assert len(in_place.returned) > 3
    for mine, theirs in zip(in_place.returned, fresh.returned, strict=True):
        assert all(map(torch.equal, mine.value, theirs.value))
    assert in_place.merged and fresh.merged and all(map(torch.equal, in_place.merged, fresh.merged))
