"""Operands in e4m3: what the cases hold, what the output must be, and which classes of rounding are told apart."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.bases import E4M3Operands, HopperE4M3Operands, added
from mla_conformance.judging.golden import golden_attention
from mla_conformance.judging.record import Record
from mla_conformance.judging.tolerance import roundoffs, tolerance
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import attention
from mla_conformance.reference.quantization import quantize_e4m3
from mla_conformance.roles.prefill.call import PrefillCall
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CPU = torch.device("cpu")
CONTEXT = Context()
CASES = CAPABILITIES["fp8_operands"].cases
NEW = Case.parse("fp8_operands:dtype=e4m3;dims=small;q=[5,9]")
TAIL = CASES[1]


def judged(backend: type[EagerPrefillBackend], case: Case = NEW, **attributes: Any) -> Record:
    """Of a backend, with class attributes of its own."""
    subject = Subject.of("EAGER", CPU)
    subject._classes[Role.PREFILL] = type(backend.__name__, (backend,), attributes)
    return judge_one(subject, case, CONTEXT)


def built(case: Case) -> Problem:
    return build_problem(case, CPU)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_operands_are_codes_of_the_values_that_were_drawn(case: Case) -> None:
    narrow, wide = built(case), built(replace(case, dtype="fp32" if case.call != "chunked_context" else "bf16"))
    assert (narrow.dtype, narrow.output_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    for codes, drawn in zip(narrow.calls, wide.calls, strict=True):
        counted = codes.key_start_loc[-1]
        for name in ("k", "v"):
            values = getattr(drawn, name)[:counted]
            assert torch.equal(getattr(codes, name)[:counted].float(), quantize_e4m3(values, 1.0).float())
        assert codes.q.dtype == torch.float8_e4m3fn
        # None saturates: the largest code is no value that was clamped.
        assert float(codes.q[: narrow.query_start_loc[-1]].float().abs().max()) < 448


def test_the_cases_drive_every_entry_and_hold_rows_without_keys() -> None:
    assert {case.call for case in CASES} == {"new_tokens", "context_chunk", "chunked_context"}
    assert {case.dtype for case in CASES} == {"e4m3"}
    (empty,) = (case for case in CASES if case.call == "context_chunk" and 0 in case.kv)
    assert bool((golden_attention(built(empty)).calls[0].lse == -torch.inf).any())


def test_golden_is_attention_to_the_widened_codes() -> None:
    problem = built(NEW)
    (call,) = problem.attention
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    rows, keys = problem.query_start_loc, call.key_start_loc
    want = attention(q, k, v, query_start_loc=rows, key_start_loc=keys, scale=NEW.softmax_scale, causal=True)
    (state,) = golden_attention(problem).calls
    assert torch.equal(state.output, want.output) and torch.equal(state.lse, want.lse)


def test_metadata_and_workspace_are_those_of_the_model() -> None:
    call = built(CASES[2]).calls[0]
    assert isinstance(call, PrefillCall) and call.metadata.chunked_context is not None
    metadata = call.metadata
    assert (metadata.q_data_type, metadata.output_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert call.metadata.chunked_context.workspace.dtype == torch.bfloat16


def test_an_output_in_codes_fails() -> None:
    found = judged(EagerPrefillBackend, _store=lambda self, accumulated, *_: accumulated.to(torch.float8_e4m3fn))
    said = "expected output of torch.bfloat16, got torch.float8_e4m3fn"
    assert found.check == Check.DTYPE and said in found.message


def test_p_in_e4m3_must_be_declared() -> None:
    assert judged(E4M3Operands).status is Status.PASS
    assert judged(E4M3Operands, declaration=Declaration(emulated=True)).check == Check.OUTPUT


class Unscaled(E4M3Operands):
    """P as it is."""

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p.to(torch.float8_e4m3fn).float()


def test_p_without_its_scale_loses_a_tail_unless_that_is_declared() -> None:
    honest = Declaration(e4m3_rounding=Rounding(p=Precision.E4M3), emulated=True)
    assert judged(E4M3Operands, TAIL).status is Status.PASS
    assert judged(Unscaled, TAIL).check == Check.OUTPUT
    assert judged(Unscaled, TAIL, declaration=honest).status is Status.PASS


def test_classes_for_e4m3_hold_for_e4m3_alone_and_the_report_names_them() -> None:
    declared = HopperE4M3Operands.declaration
    assert declared.rounding_of(torch.bfloat16) == Rounding()
    assert declared.rounding_of(torch.float8_e4m3fn) == declared.e4m3_rounding
    coarse = Declaration(rounding=Rounding(p=Precision.FLOAT16))
    assert coarse.rounding_of(torch.float8_e4m3fn) == coarse.rounding
    subject = Subject.of(f"{E4M3Operands.__module__}:{E4M3Operands.__name__}", CPU)
    assert subject.rounding["p"] == "model"
    assert subject.rounding["e4m3 operands: p"] == "scaled-e4m3"
    assert not any("e4m3 operands" in name for name in Subject.of("TORCH_SDPA", CPU).rounding)


def test_a_backend_that_does_not_declare_e4m3_is_unsupported() -> None:
    found = judge_one(Subject.of("TORCH_SDPA", CPU), NEW, CONTEXT)
    assert (found.status, found.message) == (Status.UNSUPPORTED, "dtype torch.float8_e4m3fn not supported")


@pytest.mark.parametrize(("keys", "steps"), [(1, 16), (256, 16), (4000, 250)])
def test_fp22_sums_widen_the_budget_by_their_steps(keys: int, steps: int) -> None:
    narrow = roundoffs(torch.bfloat16, Rounding(accumulation=Precision.FP22), tolerance(), keys=keys)
    exact = roundoffs(torch.bfloat16, Rounding(), tolerance(), keys=keys)
    assert (narrow.scores, narrow.values) == (16 * 2**-13, steps * 2**-13)
    assert replace(narrow, scores=0.0, values=0.0) == exact


def test_sums_of_a_tensor_core_keep_13_bits_behind_the_point() -> None:
    one = torch.ones(1, 1, 1)

    def plus(value: float) -> float:
        return float(added(one, torch.full((1, 1, 1), value), one))

    assert (plus(2**-13), plus(2**-14), plus(-(2**-14))) == (1 + 2**-13, 1.0, 1.0)
    a, b = torch.arange(-40.0, 40).view(1, 2, 40), torch.arange(120.0).view(1, 40, 3) % 7
    assert torch.equal(added(torch.zeros(1, 2, 3), a, b), a @ b)


def test_the_emulation_needs_most_of_what_fp22_allows_a_score() -> None:
    (outliers,) = (case for case in CASES if case.data == "outliers")
    (call,) = built(outliers).calls
    q, k = call.q.float().transpose(0, 1), call.k.float().permute(1, 2, 0)
    error = (added(torch.zeros(q.shape[0], q.shape[1], k.shape[2]), q, k) - q @ k).abs()
    share = float((error / (q.abs() @ k.abs())).max()) * 2**13
    assert 0.7 * tolerance().fp22_accumulation < share < 0.8 * tolerance().fp22_accumulation
