"""The table of numbers: every one has a reason, and nothing in it is unknown."""

import pytest
import torch

from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.tolerance import Tolerance, read_tolerance, roundoffs, tolerance
from mla_conformance.reference.error_budget import Roundoffs

NAMES = tuple(Tolerance.__dataclass_fields__)


def table(**entries: str) -> str:
    """A whole table in which the given entries have another body; None leaves one out."""
    bodies = {**{name: 'value = 1\nreason = "measured"' for name in NAMES}, **entries}
    return "\n".join(f"[{name}]\n{body}" for name, body in bodies.items() if body)


def test_a_layer_of_two_dtypes_of_p_is_held_to_the_coarser_roundoff_and_the_higher_floor() -> None:
    def allowed(p: Precision) -> Roundoffs:
        return roundoffs(torch.bfloat16, Rounding(p=p), tolerance())

    half, model, either = map(allowed, (Precision.FLOAT16, Precision.MODEL, Precision.MODEL_OR_FLOAT16))
    assert (either.p, either.p_floor) == (model.p, half.p_floor)
    assert half.p < model.p and half.p_floor > model.p_floor


def test_what_is_stored_in_the_models_dtype_on_its_way_may_end_at_its_floor() -> None:
    exact, parts = (
        roundoffs(torch.float16, Rounding(partial_outputs=kind), tolerance())
        for kind in (Precision.FLOAT32, Precision.MODEL)
    )
    assert parts.output_floor == 2 * exact.output_floor > 0


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
