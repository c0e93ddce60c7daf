"""The adapter against a stand-in that follows tokenspeed-mla's documentation; the kernel itself needs Blackwell."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.tokenspeed_mla import TokenspeedMLAPrefillBackend

_FUNCTION = "tokenspeed_mla/mla_prefill.py:tokenspeed_mla_prefill"


def _library(kernel: Any) -> Any:
    """Natural LSE, [T, N]; packed operands only."""

    def call(a: Any) -> Any:
        assert all(a[name].is_contiguous() for name in ("query", "key", "value"))
        queries, keys = a["cum_seq_lens_q"], a["cum_seq_lens"]
        assert (a["max_seq_len_q"], a["max_seq_len"]) == (int(queries.diff().max()), int(keys.diff().max()))
        assert a["batch_size"] == len(queries) - 1
        output, lse = kernel(a["query"], a["key"], a["value"], queries, keys, a["softmax_scale"], a["is_causal"])
        return output if a["out"] is None else a["out"].copy_(output), lse.mT.contiguous()

    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_conventions(dtype: Any, recorded: Any, installed: Any, kernel: Any, conforms: Any) -> None:
    call = recorded("tokenspeed-mla 2.0.4", _FUNCTION, _library(kernel))
    installed("tokenspeed_mla", tokenspeed_mla_prefill=call)
    conforms(TokenspeedMLAPrefillBackend, dtype=dtype)


def test_an_import_error_that_the_package_swallowed_is_reported(installed: Any) -> None:
    for name in ("cutlass", "tokenspeed_triton", "tvm_ffi"):
        installed(name)
    installed("tokenspeed_mla", _IMPORT_ERROR=ModuleNotFoundError("No module named 'cutlass'"))
    assert TokenspeedMLAPrefillBackend.missing_dependencies() == []
    assert "No module named 'cutlass'" in TokenspeedMLAPrefillBackend.broken_dependencies()[0]


def test_a_sound_install_has_no_reasons(installed: Any) -> None:
    for name in ("cutlass", "tokenspeed_triton", "tvm_ffi", "tokenspeed_mla"):
        installed(name)
    assert TokenspeedMLAPrefillBackend.broken_dependencies() == []
