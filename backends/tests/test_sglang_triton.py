"""The adapters of SGLang's Triton kernels against stand-ins that follow their source."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from mla_conformance.backends.sglang_triton import (
    SGLangTritonDecodeBackend,
    SGLangTritonPrefillBackend,
)
from mla_conformance.reference.dimensions import MLADimensions

_LABEL, _FOLDER = "sglang 0.5.23", "sglang/kernels/ops/attention"


@pytest.fixture
def extend(recorded: Any, installed: Any, kernel: Any) -> None:
    """Either stage of the kernel: new tokens, or a prefix by its slots."""

    def call(a: Any) -> None:
        assert a["skip_prefix"] != a["skip_extend"] and (a["k_scale"], a["v_scale"], a["page_size"]) == (1.0, 1.0, None)
        assert all(a[name].is_contiguous() for name in ("q_extend", "k_extend", "v_extend", "o_extend"))
        queries = a["qo_indptr"]
        assert queries.dtype == torch.int64
        assert a["max_len_extend"] == int(queries.diff().max())
        if a["skip_prefix"]:
            assert a["is_causal"] and not len(a["k_buffer"]) and not a["kv_indptr"].any()
            k, v, keys = a["k_extend"], a["v_extend"], queries
        else:
            assert not a["is_causal"] and not len(a["k_extend"])
            k, v, keys = a["k_buffer"][a["kv_indices"]], a["v_buffer"][a["kv_indices"]], a["kv_indptr"]
        output, lse = kernel(a["q_extend"], k, v, queries, keys, a["sm_scale"], a["is_causal"])
        a["o_extend"].copy_(output)
        a["lse_extend"].copy_(lse.mT)

    call = recorded(_LABEL, f"{_FOLDER}/extend_attention.py:extend_attention_fwd", call)
    installed("sglang.kernels.ops.attention.extend_attention", extend_attention_fwd=call)


@pytest.fixture
def decode(recorded: Any, installed: Any, mla_kernel: Any) -> None:
    """Slots of one token; NaN without keys; the LSE of the first split is that of all keys, the others have none."""

    def call(a: Any) -> None:
        q, slots = a["q"], a["k_buffer"]
        assert (slots.shape[1:], a["v_buffer"].shape[1:]) == ((1, 576), (1, 512))
        assert a["has_mla"] and (a["k_scale"], a["v_scale"]) == (1.0, 1.0)
        assert a["attn_lse"].shape == (*q.shape[:2], a["max_kv_splits"]) and bool((a["attn_lse"] == -math.inf).all())
        assert a["attn_logits"].shape == (*q.shape[:2], a["max_kv_splits"], 512)
        assert a["num_kv_splits"].dtype == a["kv_indptr"].dtype == torch.int32
        tables = [a["kv_indices"][i:j].tolist() for i, j in pairwise(a["kv_indptr"].tolist())]
        output, lse = mla_kernel(q, slots, [*map(len, tables)], [1] * len(q), tables, a["sm_scale"])
        output[lse[0] == -math.inf] = math.nan
        a["o"].copy_(output)
        a["attn_lse"][..., 0] = lse.mT

    call = recorded(_LABEL, f"{_FOLDER}/decode_attention.py:decode_attention_fwd", call)
    installed("sglang.kernels.ops.attention.decode_attention", decode_attention_fwd=call)


def test_prefill_conventions(extend: Any, conforms: Any) -> None:
    conforms(SGLangTritonPrefillBackend)


@pytest.mark.parametrize("lengths", [(65, 0, 130), (1, 64, 63)])
def test_decode_conventions(lengths: Any, decode: Any, decodes: Any) -> None:
    decodes(SGLangTritonDecodeBackend, 32, (1, 1, 1), lengths)


def test_values_need_more_than_32_columns() -> None:
    small, usual = (MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=v) for v in (32, 128))
    assert not SGLangTritonPrefillBackend.supports_mla_dimensions(small)
    assert SGLangTritonPrefillBackend.supports_mla_dimensions(usual)
