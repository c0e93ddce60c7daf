"""The judge: every way of being wrong is caught by its check and said in a sentence; honest kernels pass."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case, Data
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.operands import REGIMES, Regime
from mla_conformance.report.outcome import capability_lines
from mla_conformance.tests import drawn
from mla_conformance.tests.drawn import CONTEXT, little_work, subject_of
from mla_conformance.trials.trial import judge_one

PLAIN = "new_tokens:dims=small;heads=3;q=[5,9];lse=0"
WITH_LSE = "lse:dims=small;heads=3;q=[5,9]"
SQUARE = "lse:dims=small;heads=4;q=[4]"
EMPTY_ROWS = "empty_rows:call=context_chunk;dims=small;heads=3;q=[3,4];kv=[0,9]"
CHUNKED = "chunked_context:dims=small;heads=3;q=[3,4];kv=[40,0];workspace=32"
OUT = "out_tensor:dims=small;heads=3;q=[5];out=1;lse=0"
FP8 = "quant_output_fp8:dims=small;heads=3;q=[5];lse=0;quant=fp8;oscale=300"
SIDE_EFFECTS = "no_side_effects:dims=small;heads=3;q=[5,9]"


class Changed(EagerPrefillBackend):
    """EAGER, whose results are changed on the way out."""

    @staticmethod
    def change(*results: torch.Tensor) -> Any:
        return results if len(results) > 1 else results[0]

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().run_prefill_new_tokens(*args, **kwargs)
        return self.change(*returned) if isinstance(returned, tuple) else self.change(returned)

    def run_prefill_context_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(*super().run_prefill_context_chunk(*args, **kwargs))


Change = Callable[..., Any]


def at(place: Any, change: Change) -> Change:
    """Changes the output in one place."""

    def changed(*results: torch.Tensor) -> Any:
        results[0][place] = change(results[0][place])
        return Changed.change(*results)

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
    "mean of nothing": at(slice(3), lambda _: 1e-6),
    "rotated heads": lambda output: output.roll(1, dims=1),
    "one element off": at((2, 1, 3), lambda element: 1.02 * element),
    "lse of float64": of_lse(lambda lse: lse.double()),
    "lse elsewhere": of_lse(lambda lse: lse.to("meta")),
    "positive infinity": of_lse(lambda lse: lse.masked_fill(lse == -math.inf, math.inf)),
    "finite sentinel": of_lse(lambda lse: lse.clamp(min=-1e30)),
    "base 2": of_lse(lambda lse: lse / math.log(2)),
    "transposed": of_lse(lambda lse: lse.mT.contiguous()),
}


class TwoPercentScale(EagerPrefillBackend):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "scale": arguments["scale"] * 1.02})


class Raises(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("misaligned address\n  in kernel mla_fwd")


class CannotBeMade(EagerPrefillBackend):
    def __init__(self, **arguments: Any) -> None:
        raise OSError("libfast.so: cannot open")


class DoublesItsQueries(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        returned = super().run_prefill_new_tokens(q, *args, **kwargs)
        q.mul_(2)
        return returned


class ShiftsTheMetadata(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().run_prefill_new_tokens(*args, **kwargs)
        self._prefill_metadata.query_start_loc += 1
        return returned


class WritesBehindOut(EagerPrefillBackend):
    offset: ClassVar[int] = 0

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        out = kwargs["out"]
        beyond = out.storage_offset() + (out.numel() if not self.offset else self.offset)
        out.as_strided((3,), (1,), beyond).zero_()
        return super().run_prefill_new_tokens(*args, **kwargs)


class WritesBeforeOut(WritesBehindOut):
    offset: ClassVar[int] = -3


class IgnoresOut(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return super().run_prefill_new_tokens(*args, **{**kwargs, "out": None})


class OneBufferForAll(Changed):
    buffer: ClassVar[torch.Tensor] = torch.zeros(1 << 16, dtype=torch.bfloat16)

    @classmethod
    def change(cls, *results: torch.Tensor) -> Any:
        output = cls.buffer[: results[0].numel()].view(results[0].shape).copy_(results[0])
        return (output, *results[1:]) if len(results) > 1 else output


class InvertedScale(EagerPrefillBackend):
    def _quantise(self, accumulated: torch.Tensor, output_scale: torch.Tensor) -> torch.Tensor:
        return super()._quantise(accumulated, 1 / output_scale)


class Unsaturated(EagerPrefillBackend):
    def _quantise(self, accumulated: torch.Tensor, output_scale: torch.Tensor) -> torch.Tensor:
        codes = super()._quantise(accumulated, output_scale)
        codes.view(torch.uint8).masked_fill_((accumulated / output_scale).abs() > 464, 0x7F)
        return codes


class WritesCodesOnly(EagerPrefillBackend):
    @classmethod
    def supports_unquantised_output(cls, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16


def judged(kernel: type | str, case_id: str) -> Record:
    """Of a class here, a change of EAGER's results by its name, or a backend by its."""
    if kernel not in CHANGES:
        return drawn.judged(kernel, case_id)
    subject = subject_of(Changed)
    subject._classes[Role.PREFILL] = type("Wrong", (Changed,), {"change": staticmethod(CHANGES[str(kernel)])})
    return judge_one(subject, Case.parse(case_id), CONTEXT)


def failure_of(kernel: type | str, case_id: str) -> Record:
    record = judged(kernel, case_id)
    assert record.status is Status.FAIL and record.message.endswith(f"(SPEC {record.clause})")
    return record


@pytest.mark.parametrize(
    ("kernel", "case_id", "check", "said"),
    [
        (Raises, PLAIN, Check.CALL, "the call raised RuntimeError: misaligned address in kernel mla_fwd"),
        (CannotBeMade, PLAIN, Check.CALL, "the constructor raised OSError: libfast.so: cannot open"),
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
        ("finite sentinel", EMPTY_ROWS, Check.MASK, "expected -inf, no key is visible"),
        ("mean of nothing", EMPTY_ROWS, Check.MASK, "where no key is visible, expected 0, at request 0, query 0"),
        ("base 2", WITH_LSE, Check.LSE, "in base 2, expected the natural logarithm"),
        ("base 2", CHUNKED, Check.LSE, "in base 2"),
        ("transposed", SQUARE, Check.LSE, "the LSE is transposed, expected [heads, tokens]"),
        (TwoPercentScale, WITH_LSE, Check.LSE, ", expected "),
        (TwoPercentScale, "new_tokens:q=[130];lse=0", Check.OUTPUT, "×"),
        ("rotated heads", PLAIN, Check.OUTPUT, "heads are rotated by 1"),
        ("one element off", PLAIN, Check.OUTPUT, "at request 0, query 2, head 1, column 3, expected "),
        (InvertedScale, FP8, Check.OUTPUT, "codes outside the allowed interval"),
        (Unsaturated, FP8, Check.MASK, "output is nan"),
        (IgnoresOut, OUT, Check.OUT_TENSOR, "does not share the storage of out="),
        (WritesBehindOut, OUT, Check.OUT_OF_BOUNDS_WRITE, "6 bytes around out= were overwritten"),
        (WritesBeforeOut, OUT, Check.OUT_OF_BOUNDS_WRITE, "6 bytes around out= were overwritten"),
        (DoublesItsQueries, PLAIN, Check.MUTATED_INPUT, "the call changed q of new tokens"),
        (ShiftsTheMetadata, PLAIN, Check.MUTATED_INPUT, "the call changed query_start_loc"),
    ],
)
def test_what_is_wrong_is_caught_and_said(kernel: type | str, case_id: str, check: Check, said: str) -> None:
    record = failure_of(kernel, case_id)
    assert record.check == check and said in f"{record.message} · {record.finding}", record


def test_a_failure_says_where_and_by_value_how_much_of_the_budget_it_used() -> None:
    assert failure_of("nan column", PLAIN).where == {"request": 1, "query": 1, "head": 2, "column": 7}
    assert failure_of(TwoPercentScale, WITH_LSE).shares["lse"] > 1
    assert failure_of("one element off", PLAIN).shares["element"] > 1


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


def test_a_result_that_a_later_call_overwrites_is_stale() -> None:
    record = failure_of(OneBufferForAll, SIDE_EFFECTS)
    assert record.check == Check.STALE_RESULT
    assert record.message.startswith("a later call overwrote the result of an earlier one")
    assert judged(OneBufferForAll, PLAIN).status is Status.PASS


def test_a_golden_result_that_is_no_number_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Regime("NaN", lambda site: site.q * torch.nan)
    monkeypatch.setitem(REGIMES, Data.NEEDLE, broken)
    record = judged(EagerPrefillBackend, "lse:dims=small;q=[5];data=needle;seed=8")
    assert record.status is Status.UNAVAILABLE and "the inputs are at fault, not the kernel" in record.message


def test_what_is_declared_unsupported_does_not_fail() -> None:
    for case_id, said in (
        ("quant_output_fp8:dims=small;q=[5];lse=0;quant=fp8", "fused e4m3 output not declared"),
        ("dtypes:dims=small;q=[5];dtype=fp64", "dtype torch.float64 not supported"),
    ):
        record = judged("TORCH_SDPA", case_id)
        assert (record.status, record.message) == (Status.UNSUPPORTED, said)
    # Codes only, of one dtype.
    found = {text: judged(WritesCodesOnly, f"lse:dims=small;q=[5]{text}") for text in ("", ";dtype=fp16")}
    assert found[""].message == "unquantised output of torch.bfloat16 not declared"
    assert [record.status for record in found.values()] == [Status.UNSUPPORTED, Status.PASS]
    assert judged(WritesCodesOnly, FP8).status is Status.PASS


def test_a_backend_that_cannot_say_what_it_supports_fails() -> None:
    record = failure_of(CannotBeMade, FP8)
    assert record.check == Check.CALL
    assert record.message.startswith("asked what it supports, it raised OSError: libfast.so")


@pytest.mark.parametrize(
    ("answer", "described"),
    [
        ("no fp16", "'no fp16'"),
        (["no fp16", 3], "a list of str, int"),
        (iter(["no fp16"]), "a value of type list_iterator"),
    ],
)
def test_an_answer_that_is_no_list_of_reasons_fails(
    monkeypatch: pytest.MonkeyPatch, answer: object, described: str
) -> None:
    monkeypatch.setattr(EagerPrefillBackend, "validate_configuration", lambda *_: answer)
    said = f"asked what it supports, validate_configuration returned {described}, expected a list of reasons (strings)"
    record = failure_of("EAGER", PLAIN)
    assert record.check == Check.CALL and record.message.startswith(said)


@pytest.mark.parametrize("name", ["EAGER", "TORCH_SDPA"])
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(case=little_work("combinations", heads=("1", "odd", "8")))
def test_honest_kernels_raise_no_alarm(name: str, case: Case) -> None:
    record = drawn.judged(name, case)
    assert record.status is Status.PASS or (name, record.status) == ("TORCH_SDPA", Status.UNSUPPORTED), record.message


@pytest.mark.parametrize(
    ("kernel", "case_id"),
    [
        (
            "mla_conformance.defects.honest:TwoPasses",
            "context_chunk:dims=small;heads=64;q=[128];kv=[26];data=zero_keys;scale=123",
        ),
        ("EAGER", "index_write:call=write_index;dims=128-0-128-128;q=[0,0];kv=[1,3];page=16;cache=fp8_index"),
        (
            "EAGER",
            "prepare_index:call=prepare_index;dtype=fp16;dims=96-32-128-128;heads=40;q=[2x64];kv=[40000x13,513,40000x20,1100,"
            "40000x13,32767x16];scale=99;data=integers;poison=large;rope_last=1;scales=pow2;eps=32",
        ),
    ],
    ids=["rows that are alike", "nothing to write", "a weight of 0, which tells no scale"],
)
def test_what_right_kernels_showed_is_no_failure(kernel: type | str, case_id: str) -> None:
    record = judged(kernel, case_id)
    assert record.status is Status.PASS, record.message


def test_a_sum_over_keys_one_after_another_may_stray() -> None:
    """As PyTorch's kernel has it in float32, which a drawn case blamed."""
    case = "decode_combinations:call=decode;dtype=fp32;dims=small;heads=1;q=[1];kv=[8999];page=64;scale=1;data=outliers"
    found = drawn.judged("TORCH_SDPA", case)
    assert found.status is Status.PASS and found.shares["element"] < 0.5
