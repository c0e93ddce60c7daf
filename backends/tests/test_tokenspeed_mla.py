"""The adapters against stand-ins that follow tokenspeed-mla's documentation and source; the kernels need Blackwell."""

import math
from typing import Any

import pytest
import torch

from mla_conformance.backends.tokenspeed_mla import TokenspeedMLADecodeBackend, TokenspeedMLAPrefillBackend

_PREFILL = "tokenspeed_mla/mla_prefill.py:tokenspeed_mla_prefill"
_DECODE = "tokenspeed_mla/mla_decode.py:tokenspeed_mla_decode"
_BACKENDS: list[Any] = [TokenspeedMLAPrefillBackend, TokenspeedMLADecodeBackend]


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
def test_conventions_of_prefill(dtype: Any, recorded: Any, installed: Any, kernel: Any, conforms: Any) -> None:
    call = recorded("tokenspeed-mla 2.0.4", _PREFILL, _library(kernel))
    installed("tokenspeed_mla", tokenspeed_mla_prefill=call)
    conforms(TokenspeedMLAPrefillBackend, dtype=dtype)


@pytest.fixture
def decode_library(recorded: Any, installed: Any, mla_kernel: Any) -> None:
    """Queries [B, S, N, L + R]; LSE to base 2, [B, S, N]."""

    def call(a: Any) -> Any:
        q, cache = a["query"], a["kv_cache"]
        requests, queries, heads, _ = q.shape
        assert a["return_lse"] and a["causal_mask"] and a["max_seq_len"] > 0
        assert (a["kv_lora_rank"], a["qk_rope_head_dim"]) == (512, 64)
        # What its docstring asks for, at the splits that its heuristic makes on 148 processors.
        tiles = -(-heads * queries // 128)
        splits, workspace = max(1, min(32, 148 // requests // (tiles * 2))), a["workspace_buffer"]
        assert workspace.dtype == torch.int8 and workspace.numel() >= requests * 128 * tiles * splits * 513 * 4
        assert a["block_tables"].is_contiguous() and a["seq_lens"].dtype == torch.int32
        lengths = a["seq_lens"].tolist()
        sizes = [queries] * requests
        output, lse = mla_kernel(q.flatten(0, 1), cache, lengths, sizes, a["block_tables"], a["softmax_scale"])
        return output.unflatten(0, (requests, queries)), (lse / math.log(2)).mT.unflatten(0, (requests, queries))

    function = recorded("tokenspeed-mla 2.0.4", _DECODE, call)
    installed("tokenspeed_mla", tokenspeed_mla_decode=function, get_num_sm=lambda device: 148)


@pytest.mark.usefixtures("decode_library")
@pytest.mark.parametrize(("queries", "lengths"), [((1, 1, 1), (65, 0, 130)), ((3, 3), (64, 129))])
def test_conventions_of_decode(queries: Any, lengths: Any, decodes: Any) -> None:
    decodes(TokenspeedMLADecodeBackend, 32, queries, lengths)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_an_import_error_that_the_package_swallowed_is_reported(backend: Any, installed: Any) -> None:
    for name in ("cutlass", "tokenspeed_triton", "tvm_ffi"):
        installed(name)
    installed("tokenspeed_mla", _IMPORT_ERROR=ModuleNotFoundError("No module named 'cutlass'"))
    assert backend.missing_dependencies() == []
    assert "No module named 'cutlass'" in backend.broken_dependencies()[0]


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_sound_install_has_no_reasons(backend: Any, installed: Any) -> None:
    for name in ("cutlass", "tokenspeed_triton", "tvm_ffi", "tokenspeed_mla"):
        installed(name)
    assert backend.broken_dependencies() == []
