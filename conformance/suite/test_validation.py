"""Validation: what a backend declares is true, in both directions."""

import pytest

from mla_conformance.trials.trial import Trial


@pytest.mark.capability("refusals")
def test_refusals(trial: Trial) -> None:
    reasons = trial.unsupported()
    if reasons:
        trial.must_refuse(reasons)
    else:
        trial.conforms()
