"""Classes of rounding and the table of their numbers: what e4m3 may do, and that every number has a reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.bases import E4M3Operands
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.tolerance import Tolerance, read_tolerance, roundoffs, tolerance
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context
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


def test_a_backend_that_does_not_declare_e4m3_is_unsupported() -> None:
    found = judge_one(Subject.of("TORCH_SDPA", CPU), NEW, CONTEXT)
    assert (found.status, found.message) == (Status.UNSUPPORTED, "dtype torch.float8_e4m3fn not supported")


@pytest.mark.parametrize(("keys", "steps"), [(1, 16), (256, 16), (4000, 250)])
def test_fp22_sums_widen_the_budget_by_their_steps(keys: int, steps: int) -> None:
    narrow = roundoffs(torch.bfloat16, Rounding(accumulation=Precision.FP22), tolerance(), keys=keys)
    exact = roundoffs(torch.bfloat16, Rounding(), tolerance(), keys=keys)
    assert (narrow.scores, narrow.values) == (16 * 2**-13, steps * 2**-13)
    assert replace(narrow, scores=0.0, values=0.0) == exact


NAMES = tuple(Tolerance.__dataclass_fields__)


def table(**entries: str) -> str:
    """A whole table in which the given entries have another body; None leaves one out."""
    bodies = {**{name: 'value = 1\nreason = "measured"' for name in NAMES}, **entries}
    return "\n".join(f"[{name}]\n{body}" for name, body in bodies.items() if body)


def test_the_shipped_table_is_whole() -> None:
    assert all(getattr(tolerance(), name) > 0 for name in NAMES)
    assert read_tolerance(table(), "here") == Tolerance(**dict.fromkeys(NAMES, 1.0))


def test_a_number_without_a_reason_is_refused() -> None:
    for body in ("value = 1", 'value = 1\nreason = "  "'):
        with pytest.raises(InputError, match=rf"here: {NAMES[0]}\.?.*reason"):
            read_tolerance(table(**{NAMES[0]: body}), "here")


@pytest.mark.parametrize("value", ["0", "true", '"2"', "nan", "inf"])
def test_a_value_that_is_not_a_positive_number_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=rf"here: {NAMES[-1]}\.value: expected `float`"):
        read_tolerance(table(**{NAMES[-1]: f'value = {value}\nreason = "r"'}), "here")


def test_unknown_and_missing_entries_are_named() -> None:
    with pytest.raises(InputError, match="here: object contains unknown field `generosity`"):
        read_tolerance(table(generosity='value = 1\nreason = "r"'), "here")
    with pytest.raises(InputError, match=f"missing required field `{NAMES[0]}`"):
        read_tolerance(table(**{NAMES[0]: ""}), "here")
