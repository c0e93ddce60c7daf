"""Procedures: honest kernels pass each, refusals leave no trace, and a spoiled request is not judged."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import golden_attention
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.roles.table import build_problem
from mla_conformance.tests.drawn import CONTEXT, CPU, judged, subject_of
from mla_conformance.trials.graph import captured_batch, replayed_batch
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.procedures import PROCEDURES
from mla_conformance.trials.transform import scale_cache
from mla_conformance.vocabulary.capabilities import CAPABILITIES

DECODE = Case.parse("cuda_graph:call=decode;q=[1x8];kv=[2000,64,300,129,17,1000,40,5];page=64")
PREFILL = Case.parse("cuda_graph:q=[5,130,1,64]")
SEEDS = range(2, 40)
SMALL = "call=decode;dims=small;heads=2;q=[1,1];kv=[130,40]"


def test_the_capabilities_name_every_procedure_and_no_other() -> None:
    assert {capability.procedure for capability in CAPABILITIES.values()} == PROCEDURES.keys()


@pytest.mark.parametrize(
    "text",
    [
        "call_order:dims=small;heads=2;q=[5,33]",
        f"call_order:{SMALL};cache=fp8;ranks=2",
        "request_order:dims=small;heads=2;q=[5,9,1,3,2]",
        "batch_invariance:call=decode;dims=small;heads=2;q=[1x4];kv=[40,5,70,9]",
    ],
)
def test_an_honest_kernel_passes(text: str) -> None:
    found = judged("EAGER", text)
    assert (found.status, found.message) == (Status.PASS, "")


def test_only_codes_know_the_scale_of_a_cache() -> None:
    for further, same in (("", True), (";cache=fp8", False)):
        problem = build_problem(Case.parse(f"call_order:{SMALL}{further}"), CPU)
        other = scale_cache(problem, 2.0)
        before, after = (golden_attention(each).calls[0].lse for each in (problem, other))
        assert torch.equal(before, after) is same and problem.key != other.key


def test_rows_of_replays_grow_shrink_stay_and_have_no_context_or_one_token_of_it() -> None:
    first, replays = captured_batch(DECODE).kv, [replayed_batch(DECODE, 8, seed).kv for seed in SEEDS]
    for lengths in replays:
        pairs = list(zip(lengths, first, strict=True))
        assert {0, 1} <= set(lengths) and any(now == then for now, then in pairs)
        assert sum(lengths) <= sum(DECODE.kv)
    assert all(min(column) < then < max(column) for column, then in _columns(replays))
    assert len(set(replays)) == len(replays)


def _columns(replays: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    """The lengths of each row in all replays, beside its captured one."""
    return list(zip(zip(*replays, strict=True), captured_batch(DECODE).kv, strict=True))


@pytest.mark.parametrize("requests", [1, 2, 3, 5])
def test_smaller_batches_are_padded_and_fit(requests: int) -> None:
    for seed in SEEDS:
        decode, prefill = replayed_batch(DECODE, requests, seed), replayed_batch(PREFILL, min(requests, 4), seed)
        assert (len(decode.q), decode.pad) == (requests, 8 - requests)
        assert len(prefill.q) == 4 and sum(prefill.q) <= sum(PREFILL.q)
        assert set(prefill.q[min(requests, 4) :]) <= {0}


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
    trial, found = judged_trial(subject_of(backend), Case.parse(REFUSED), CONTEXT)
    assert (found.status, found.check, trial.disturbed) == (Status.FAIL, check, disturbed)
    assert said in found.message and torch.get_default_dtype() is torch.float32


def test_a_refusal_that_leaves_none_passes() -> None:
    trial, found = judged_trial(subject_of("EAGER"), Case.parse(REFUSED), CONTEXT)
    assert found.status is Status.PASS and found.message.startswith("refused: ")
    assert not trial.disturbed


NEW = "neighbours:dims=small;heads=2;q=[5,9,3]"
CHUNKED = "neighbours:call=chunked_context;dims=small;heads=2;q=[5,9,3];kv=[40,0,70];workspace=64"
ENTRIES = "neighbours:call=decode;dims=small;heads=2;q=[1,2,1];kv=[40,5,70]"
RANKS = "neighbours:call=decode;dims=small;heads=2;q=[1,1,1];kv=[40,5,70];ranks=2"
CODES = "neighbours:call=decode;dims=small;heads=2;q=[1,1,1];kv=[40,5,70];cache=fp8"
QUANTISED = "neighbours:dims=small;heads=2;q=[5,9];quant=fp8;lse=0"


@pytest.mark.parametrize("text", [NEW, CHUNKED, ENTRIES, RANKS, CODES, QUANTISED, NEW + ";out=1"])
@pytest.mark.parametrize("capability", ["neighbours", "neighbour_keys"])
def test_the_rows_of_the_spoiled_request_are_not_judged(text: str, capability: str) -> None:
    found = judged("EAGER", text.replace("neighbours", capability))
    assert (found.status, found.message) == (Status.PASS, "")


class Spreads(EagerPrefillBackend):
    """Does something to its result where any of it is not finite."""

    spread: ClassVar[Callable[..., Any]]

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output, lse = super().run_prefill_new_tokens(*args, **kwargs)
        return (output, lse) if bool(output.isfinite().all()) else type(self).spread(output, lse)


@pytest.mark.parametrize(
    ("spread", "check", "said"),
    [
        (
            lambda output, lse: (torch.cat((output[:-1], torch.zeros_like(output[-1:]))), lse),
            Check.OUTPUT,
            "output is 0 at request 2, query 2",
        ),
        (lambda output, lse: output, Check.SHAPE, "expected 2 tensor(s), got (Tensor)"),
        (lambda output, lse: 1 / 0, Check.CALL, "the call raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_spoiled_request_does_to_others_is_said(
    spread: Callable[..., Any], check: Check, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spreads, "spread", staticmethod(spread), raising=False)
    found = judged(Spreads, NEW)
    assert (found.status, found.check) == (Status.FAIL, check)
    assert found.message.startswith("beside request 0, whose queries hold NaN: new tokens: ") and said in found.message
