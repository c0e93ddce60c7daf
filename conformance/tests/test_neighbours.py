"""A spoiled request: nothing else of the inputs changes, its own rows are not judged, and all others are."""

import inspect
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.neighbours import KINDS, spoil_keys, spoil_queries
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
CONTEXT = Context()
NEW = "neighbours:dims=small;heads=2;q=[5,9,3]"
CHUNKED = "neighbours:call=chunked_context;dims=small;heads=2;q=[5,9,3];kv=[40,0,70];workspace=64"
DECODE = "neighbours:call=decode;dims=small;heads=2;q=[1,2,1];kv=[40,5,70]"
RANKS = "neighbours:call=decode;dims=small;heads=2;q=[1,1,1];kv=[40,5,70];ranks=2"
CODES = "neighbours:call=decode;dims=small;heads=2;q=[1,1,1];kv=[40,5,70];cache=fp8"
QUANTISED = "neighbours:dims=small;heads=2;q=[5,9];quant=fp8;lse=0"


def judged(backend: type, case: str) -> Record:
    location = f"{inspect.getfile(backend)}:{backend.__name__}"
    return judge_one(Subject.of(location, CPU), Case.parse(case), CONTEXT)


def changed(problem: Problem, clean: Problem) -> dict[str, int]:
    """Bytes of each operand that differ."""
    pairs = {name: (tensor, clean.caller_owned[name]) for name, tensor in problem.caller_owned.items()}
    counts = {name: int((storage_bytes(x) != storage_bytes(y)).sum()) for name, (x, y) in pairs.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_queries_of_the_request_are_spoiled(kind: str) -> None:
    problem, clean = (build_problem(Case.parse(NEW), CPU) for _ in range(2))
    spoil_queries(problem, 1, kind)
    q, before = problem.calls[0].q, clean.calls[0].q
    assert changed(problem, clean).keys() == {"q of new tokens"}
    assert torch.equal(q[:5], before[:5]) and torch.equal(q[14:], before[14:])
    spoiled = q[5:14].float()
    assert bool((spoiled.isnan() | (spoiled >= torch.finfo(q.dtype).max)).all())


def test_only_the_keys_and_values_of_the_request_are_spoiled_in_every_call() -> None:
    problem, clean = (build_problem(Case.parse(CHUNKED), CPU) for _ in range(2))
    spoil_keys(problem, 2, "nan")
    assert {name.split(" ")[0] for name in changed(problem, clean)} == {"k", "v"}
    for call, before in zip(problem.attention, clean.attention, strict=True):
        rows = slice(call.key_start_loc[2], call.key_start_loc[3])
        for mine, theirs in ((call.k, before.k), (call.v, before.v)):
            assert bool(mine[rows].isnan().all()) and torch.equal(mine[: rows.start], theirs[: rows.start])


@pytest.mark.parametrize("text", [DECODE, CODES])
def test_only_the_entries_of_the_request_are_spoiled(text: str) -> None:
    problem, clean = (build_problem(Case.parse(text), CPU) for _ in range(2))
    spoil_keys(problem, 1, "nan")
    call: Any = problem.calls[0]
    assert changed(problem, clean).keys() == {"kv_cache of decode"}
    cache, before = (storage_bytes(x.calls[0].owned()["kv_cache of decode"]) for x in (problem, clean))
    length = int(call.metadata.seq_lens_cpu[1])
    entries = (cache != before).view(-1, call.kv_cache.shape[2] * call.kv_cache.element_size()).any(dim=1)
    assert int(entries.sum()) == length
    block = int(call.metadata.block_table[1, 0])
    assert entries.nonzero().flatten().tolist() == [block * call.kv_cache.shape[1] + slot for slot in range(length)]


@pytest.mark.parametrize("text", [NEW, CHUNKED, DECODE, RANKS, CODES, QUANTISED, NEW + ";out=1"])
@pytest.mark.parametrize("capability", ["neighbours", "neighbour_keys"])
def test_the_rows_of_the_spoiled_request_are_not_judged(text: str, capability: str) -> None:
    found = judge_one(Subject.of("EAGER", CPU), Case.parse(text.replace("neighbours", capability)), CONTEXT)
    assert (found.status, found.message) == (Status.PASS, "")


class Spreads(EagerPrefillBackend):
    """Does something to its result where any of it is not finite."""

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output, lse = super().run_prefill_new_tokens(*args, **kwargs)
        return (output, lse) if bool(output.isfinite().all()) else self.spread(output, lse)

    def spread(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output, lse


class LosesItsLastRow(Spreads):
    def spread(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        output[-1] = 0.0
        return output, lse


class LosesItsLse(Spreads):
    def spread(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        return output


class Stops(Spreads):
    def spread(self, output: torch.Tensor, lse: torch.Tensor) -> Any:
        raise FloatingPointError("not a number")


@pytest.mark.parametrize(
    ("backend", "check", "said"),
    [
        (LosesItsLastRow, Check.OUTPUT, "output is 0 at request 2, query 2"),
        (LosesItsLse, Check.SHAPE, "expected 2 tensor(s), got (Tensor)"),
        (Stops, Check.CALL, "the call raised FloatingPointError: not a number"),
    ],
)
def test_what_a_spoiled_request_does_to_others_is_said(backend: type, check: Check, said: str) -> None:
    found = judged(backend, NEW)
    assert (found.status, found.check) == (Status.FAIL, check)
    assert found.message.startswith("beside request 0, whose queries hold NaN: new tokens: ") and said in found.message
