"""Memory: layouts that are read, tensors that are written, and everything that must stay as it was."""

import pytest

from mla_conformance.trials.trial import Trial, returned_bytes


@pytest.mark.capability("v_padding")
def test_v_padding(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("strided_inputs")
def test_strided_inputs(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("out_tensor")
def test_out_tensor(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("quant_output_fp8")
def test_quant_output_fp8(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("no_side_effects")
def test_no_side_effects(trial: Trial) -> None:
    first = trial.conforms()
    before = returned_bytes(first)
    trial.conforms(trial.other_problem())
    trial.unchanged(first, before)
    trial.conforms()
