"""The adapters of LMDeploy's dense Triton kernels against stand-ins that follow their source."""

from enum import IntEnum
from typing import Any

import pytest
import torch

from mla_conformance.backends.lmdeploy_triton import (
    LmdeployDecodeBackend,
    LmdeployPrefillBackend,
)
from mla_conformance.reference.dimensions import MLADimensions

_LABEL, _FOLDER = "lmdeploy 0.18.0", "lmdeploy/pytorch/kernels/cuda"


class QuantPolicy(IntEnum):
    """The library's names of what its caches hold."""

    NONE = 0
    FP8 = 16


@pytest.fixture
def prefill(recorded: Any, installed: Any, kernel: Any) -> None:
    """Rows of one token, all heads of a token together."""

    def call(a: Any) -> torch.Tensor:
        queries = a["cu_seqlens_q"]
        assert a["causal"] and a["kv_layout"] == "shd" and a["max_seqlen_q"] == 33
        output: torch.Tensor = kernel(
            a["q"], a["k"], a["v"], queries, a["cu_seqlens_k"], a["softmax_scale"], a["causal"]
        )[0]
        return output

    call = recorded(_LABEL, f"{_FOLDER}/flashattention.py:flash_attn_varlen_func", call)
    installed("lmdeploy.pytorch.kernels.cuda.flashattention", flash_attn_varlen_func=call)


@pytest.fixture
def decode(recorded: Any, installed: Any, mla_kernel: Any) -> None:
    """Values that share the memory of the keys; NaN without keys."""

    def call(a: Any) -> torch.Tensor:
        keys, values, lengths = a["k_cache"], a["v_cache"], a["cache_seqlens"].tolist()
        assert keys.shape[1:] == (64, 1, 576) and values.shape[1:] == (64, 1, 512)
        assert keys.data_ptr() == values.data_ptr() and a["quant_policy"] == QuantPolicy.NONE
        assert a["k_scales_zeros"] is a["v_scales_zeros"] is None
        found, lse = mla_kernel(a["q"], keys[:, :, 0], lengths, [1] * len(lengths), a["page_table"], a["softmax_scale"])
        output: torch.Tensor = found.masked_fill(lse.mT.unsqueeze(-1).isneginf(), torch.nan)
        return output

    call = recorded(_LABEL, f"{_FOLDER}/pagedattention.py:flash_attn_with_kvcache", call)
    module = "lmdeploy.pytorch.kernels.cuda.pagedattention"
    installed(module, flash_attn_with_kvcache=call, QuantPolicy=QuantPolicy)


@pytest.mark.usefixtures("prefill")
@pytest.mark.parametrize("out", [False, True])
def test_prefill_conventions(out: bool, serves_new_tokens: Any) -> None:
    serves_new_tokens(LmdeployPrefillBackend, 192, 256, out)


@pytest.mark.usefixtures("decode")
@pytest.mark.parametrize("lengths", [(65, 0, 130), (1, 64, 63)])
def test_decode_conventions(lengths: Any, decodes: Any) -> None:
    decodes(LmdeployDecodeBackend, 64, (1, 1, 1), lengths)


@pytest.mark.parametrize(
    ("nope", "rope", "value", "fits"),
    [
        (128, 64, 128, False),
        (192, 64, 256, True),
        (64, 64, 128, True),
        (512, 64, 512, True),
        (64, 0, 256, False),
        (8, 4, 16, False),
    ],
)
def test_says_which_head_dims_fit_hopper(nope: int, rope: int, value: int, fits: bool) -> None:
    dims = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
    assert LmdeployPrefillBackend.supports_mla_dimensions(dims) == fits
