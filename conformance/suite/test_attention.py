"""Values: what a backend computes, for every shape and number it declares."""

import pytest

from mla_conformance.trials.trial import Trial


@pytest.mark.capability("new_tokens")
def test_new_tokens(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("lse")
def test_lse(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("context_chunk")
def test_context_chunk(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("chunked_context")
def test_chunked_context(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("empty_rows")
def test_empty_rows(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("merge_states")
def test_merge_states(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("weights")
def test_weights(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("logit_range")
def test_logit_range(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("shift_invariance")
def test_shift_invariance(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("softmax_scale")
def test_softmax_scale(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("mla_dims")
def test_mla_dims(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("head_counts")
def test_head_counts(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("token_counts")
def test_token_counts(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("loose_maxima")
def test_loose_maxima(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("dtypes")
def test_dtypes(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("fp8_operands")
def test_fp8_operands(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("combinations")
def test_combinations(trial: Trial) -> None:
    trial.conforms()
