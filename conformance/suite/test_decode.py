"""Decode: absorbed queries against the paged cache of latents, in every layout, on one rank and on several."""

import pytest

from mla_conformance.trials.trial import Trial


@pytest.mark.capability("decode")
def test_decode(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("decode_lse")
def test_decode_lse(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("decode_multi_token")
def test_decode_multi_token(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("paged_cache")
def test_paged_cache(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("kv_cache_fp8")
def test_kv_cache_fp8(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("kv_cache_fp8_ds_mla")
def test_kv_cache_fp8_ds_mla(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("dcp")
def test_dcp(trial: Trial) -> None:
    trial.conforms()
