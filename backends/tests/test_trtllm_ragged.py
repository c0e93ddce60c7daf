"""The adapter against a stand-in that follows FlashInfer's documentation; the kernel itself needs Blackwell."""

import math
from typing import Any

import pytest
import torch

from mla_conformance.backends.trtllm_ragged import TrtllmRaggedPrefillBackend

_FUNCTION = "flashinfer/prefill.py:trtllm_ragged_attention_deepseek"
_VERSIONS = ["flashinfer-python 0.6.13", "flashinfer-python 0.7.2.post1"]


def _library(kernel: Any, host_lengths: Any) -> Any:
    """LSE to base 2, [T, N]; strides of q ignored; garbage for a request without keys unless the host tells."""

    def call(a: Any) -> Any:
        assert a["query"].is_contiguous()
        assert a["bmm2_scale"] == 1.0
        assert not a["workspace_buffer"].any()
        queries, keys = a["cum_seq_lens_q"], a["cum_seq_lens_kv"]
        assert a["seq_lens"].tolist() == keys.diff().tolist()
        assert (a["max_q_len"], a["max_kv_len"]) == (int(queries.diff().max()), int(keys.diff().max()))
        if host_lengths:
            assert a["kv_seq_lens_cpu"].tolist() == keys.diff().tolist()
        output, lse = kernel(a["query"], a["key"], a["value"], queries, keys, a["bmm1_scale"], a["is_causal"])
        empty = lse[0] == -math.inf
        output[empty], lse[:, empty] = math.nan, 7.0
        return output if a["out"] is None else a["out"].copy_(output), (lse / math.log(2)).mT.contiguous()

    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("version", _VERSIONS)
def test_conventions(version: Any, dtype: Any, recorded: Any, installed: Any, kernel: Any, conforms: Any) -> None:
    call = recorded(version, _FUNCTION, _library(kernel, "0.7" in version))
    installed("flashinfer.prefill", trtllm_ragged_attention_deepseek=call)
    conforms(TrtllmRaggedPrefillBackend, dtype=dtype)


def test_says_that_the_package_of_the_same_name_is_a_stub(monkeypatch: Any) -> None:
    monkeypatch.setattr("mla_conformance.backends.dependencies._installed", lambda module: False)
    assert "tensorrt-llm on PyPI is a stub" in TrtllmRaggedPrefillBackend.missing_dependencies()[0]
    assert torch.bfloat16 in TrtllmRaggedPrefillBackend.supported_dtypes
