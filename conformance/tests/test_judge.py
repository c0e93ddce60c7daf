"""The judge: every way of being wrong is caught by its check and said in a sentence; honest kernels pass."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Data
from mla_conformance.judging.diagnosis import common_factor
from mla_conformance.judging.record import Check, Record, Status
from mla_conformance.problems.operands import REGIMES, Regime
from mla_conformance.report.outcome import capability_lines
from mla_conformance.tests import drawn

PLAIN = "new_tokens:dims=small;heads=3;q=[5,9];lse=0"
WITH_LSE = "lse:dims=small;heads=3;q=[5,9]"
EMPTY_ROWS = "empty_rows:call=context_chunk;dims=small;heads=3;q=[3,4];kv=[0,9]"
FP8 = "quant_output_fp8:dims=small;heads=3;q=[5];lse=0;quant=fp8;oscale=300"

Change = Callable[..., Any]


def at(place: Any, change: Change) -> Change:
    def changed(output: torch.Tensor, *lse: torch.Tensor) -> Any:
        output[place] = change(output[place])
        return (output, *lse) if lse else output

    return changed


def of_lse(change: Change) -> Change:
    return lambda output, lse: (output, change(lse))


CHANGES: dict[str, Change] = {
    "one tensor too many": lambda *results: (*results, results[0]),
    "no tensor": lambda *results: None,
    "flat": lambda output: output.flatten(1),
    "float32": lambda output: output.float(),
    "nan column": at((6, 2, 7), lambda _: math.nan),
    "last row never written": at(-1, lambda _: math.nan),
    "rotated heads": lambda output: output.roll(1, dims=1),
    "one element off": at((2, 1, 3), lambda element: 1.02 * element),
    "lse of float64": of_lse(lambda lse: lse.double()),
    "lse elsewhere": of_lse(lambda lse: lse.to("meta")),
    "positive infinity": of_lse(lambda lse: lse.masked_fill(lse == -math.inf, math.inf)),
    "two percent off": of_lse(lambda lse: 1.02 * lse),
    "transposed": of_lse(lambda lse: lse.mT.contiguous()),
}


def doubling(run: Change, q: torch.Tensor, *operands: Any, **options: Any) -> Any:
    returned = run(q, *operands, **options)
    q.mul_(2)
    return returned


def shifting(run: Any, *operands: Any, **options: Any) -> Any:
    returned = run(*operands, **options)
    run.args[0]._prefill_metadata.query_start_loc += 1
    return returned


def calling(step: Change) -> type:
    return drawn.changed(EagerPrefillBackend, run_prefill_new_tokens=step)


RAISES = calling(Mock(side_effect=RuntimeError("misaligned address\n  in kernel mla_fwd")))
CANNOT_BE_MADE = drawn.changed(EagerPrefillBackend, __init__=Mock(side_effect=OSError("libfast.so: cannot open")))


class WritesCodesOnly(EagerPrefillBackend):
    @classmethod
    def supports_unquantised_output(cls, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16


def judged(kernel: type | str, case_id: str) -> Record:
    def changing(run: Change, *operands: Any, **options: Any) -> Any:
        returned = run(*operands, **options)
        return CHANGES[str(kernel)](*(returned if isinstance(returned, tuple) else (returned,)))

    steps = dict.fromkeys(("run_prefill_new_tokens", "run_prefill_context_chunk"), changing)
    return drawn.judged(drawn.changed(EagerPrefillBackend, **steps) if kernel in CHANGES else kernel, case_id)


def failure_of(kernel: type | str, case_id: str) -> Record:
    record = judged(kernel, case_id)
    assert record.status is Status.FAIL and record.message.endswith(f"(SPEC {record.clause})")
    return record


@pytest.mark.parametrize(
    ("kernel", "case_id", "check", "said"),
    [
        (RAISES, PLAIN, Check.CALL, "the call raised RuntimeError: misaligned address in kernel mla_fwd"),
        (CANNOT_BE_MADE, PLAIN, Check.CALL, "the constructor raised OSError: libfast.so: cannot open"),
        ("one tensor too many", PLAIN, Check.SHAPE, "expected the output itself, got a tuple of 2"),
        ("one tensor too many", WITH_LSE, Check.SHAPE, "expected 2 tensor(s), got (Tensor, Tensor, Tensor)"),
        ("no tensor", PLAIN, Check.SHAPE, "expected 1 tensor(s), got (NoneType)"),
        ("flat", PLAIN, Check.SHAPE, "expected output of shape [14, 3, 16], got [14, 48]"),
        ("transposed", WITH_LSE, Check.SHAPE, "expected LSE of shape [3, 14], got [14, 3]"),
        ("transposed", WITH_LSE, Check.SHAPE, "the LSE is transposed, expected [heads, tokens]"),
        ("float32", PLAIN, Check.DTYPE, "expected output of torch.bfloat16, got torch.float32"),
        ("lse of float64", WITH_LSE, Check.DTYPE, "expected LSE of torch.float32, got torch.float64"),
        ("lse elsewhere", WITH_LSE, Check.DEVICE, "expected LSE on cpu, got meta"),
        ("nan column", PLAIN, Check.MASK, "output is nan at request 1, query 1, head 2, column 7"),
        ("last row never written", PLAIN, Check.MASK, "1 of 14 rows hold nothing but NaN"),
        ("positive infinity", EMPTY_ROWS, Check.MASK, "LSE is inf at request 0, query 0, head 0, expected -inf"),
        ("two percent off", WITH_LSE, Check.LSE, ", expected "),
        ("rotated heads", PLAIN, Check.OUTPUT, "heads are rotated by 1"),
        ("one element off", PLAIN, Check.OUTPUT, "at request 0, query 2, head 1, column 3, expected "),
        (calling(doubling), PLAIN, Check.MUTATED_INPUT, "the call changed q of new tokens"),
        (calling(shifting), PLAIN, Check.MUTATED_INPUT, "the call changed query_start_loc"),
        (CANNOT_BE_MADE, FP8, Check.CALL, "asked what it supports, it raised OSError: libfast.so"),
    ],
)
def test_what_is_wrong_is_caught_and_said(kernel: type | str, case_id: str, check: Check, said: str) -> None:
    record = failure_of(kernel, case_id)
    assert record.check == check and said in f"{record.message} · {record.finding}", record


def test_rows_whose_budget_is_as_wide_as_their_result_are_counted_as_neither_right_nor_wrong() -> None:
    fields = "mixed_batch:call=layer;dims=32-16-32-64;heads=2;q=[1,1];kv=[70,14];page=32;decodes=2;data=extreme_logits"
    plain, wide = judged("EAGER", fields), judged("EAGER", f"{fields};weights=dense")  # projecting moves such logits
    assert [each.status for each in (plain, wide)] == [Status.PASS, Status.PASS]
    assert (plain.inconclusive, wide.inconclusive) == (0, 4)
    # Each request alone comes last, which has fewer of them.
    steps = judged("EAGER", f"{fields};weights=dense".replace("mixed_batch", "batch_invariance"))
    assert (steps.status, steps.inconclusive) == (Status.PASS, 4)
    lines = " ".join(capability_lines([plain, wide]))
    assert "4 rows of 1 case inconclusive" in lines and "zeros would pass" in lines


def test_a_failure_says_where_and_how_much_and_a_golden_result_that_is_no_number_is_none(monkeypatch: Any) -> None:
    broken = Regime("NaN", lambda site: site.q * torch.nan)
    monkeypatch.setitem(REGIMES, Data.NEEDLE, broken)
    record = judged(EagerPrefillBackend, "lse:dims=small;q=[5];data=needle;seed=8")
    assert record.status is Status.UNAVAILABLE and "the inputs are at fault, not the kernel" in record.message
    assert failure_of("nan column", PLAIN).where == {"request": 1, "query": 1, "head": 2, "column": 7}
    assert failure_of("two percent off", WITH_LSE).shares["lse"] > 1
    assert failure_of("one element off", PLAIN).shares["element"] > 1


def test_what_is_declared_unsupported_does_not_fail() -> None:
    for case_id, said in (
        ("quant_output_fp8:dims=small;q=[5];lse=0;quant=fp8", "fused e4m3 output not declared"),
        ("dtypes:dims=small;q=[5];dtype=fp64", "dtype torch.float64 not supported"),
        ("fp8_operands:dtype=e4m3;dims=small;q=[5,9]", "dtype torch.float8_e4m3fn not supported"),
    ):
        record = judged("TORCH_SDPA", case_id)
        assert (record.status, record.message) == (Status.UNSUPPORTED, said)
    # Codes only, of one dtype.
    found = {text: judged(WritesCodesOnly, f"lse:dims=small;q=[5]{text}") for text in ("", ";dtype=fp16")}
    assert found[""].message == "unquantised output of torch.bfloat16 not declared"
    assert [record.status for record in found.values()] == [Status.UNSUPPORTED, Status.PASS]
    assert judged(WritesCodesOnly, FP8).status is Status.PASS


@pytest.mark.parametrize(
    ("answer", "described"),
    [("no fp16", "'no fp16'"), (["no", 3], "a list of str, int"), (iter(["no"]), "a value of type list_iterator")],
)
def test_an_answer_that_is_no_list_of_reasons_fails(monkeypatch: Any, answer: object, described: str) -> None:
    monkeypatch.setattr(EagerPrefillBackend, "validate_configuration", lambda *_: answer)
    said = f"asked what it supports, validate_configuration returned {described}, expected a list of reasons (strings)"
    record = failure_of("EAGER", PLAIN)
    assert record.check == Check.CALL and record.message.startswith(said)


def test_a_common_factor_is_told_where_all_are_too_large_and_not_where_some_are_too_small() -> None:
    want = torch.linspace(8.0, 10.0, 16, dtype=torch.float64)
    wrong = torch.ones(16, dtype=torch.bool)
    assert common_factor(want * 1.01, want, wrong) == "; got / expected = 1.01 there"
    assert not common_factor(want * (1 + 0.003 * torch.arange(16).cos()), want, wrong)
