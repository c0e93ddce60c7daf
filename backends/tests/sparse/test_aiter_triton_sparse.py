"""The adapter of AITER's sparse kernel against a stand-in that follows its source."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.aiter_triton_sparse import AiterTritonSparseBackend

_MODULE = "aiter.ops.triton.attention.unified_attention_sparse_mla"


@pytest.fixture
def library(recorded: Any, installed: Any, sparse_kernel: Any, slots_of: Any) -> None:
    """Lists of slots; NaN in a row whose list names none."""

    def call(a: Any) -> None:
        cache, lists = a["kv"], a["topk_indices"]
        assert cache.shape[2] == 1 and lists.is_contiguous() and a["q"].is_contiguous() and a["kv_lora_rank"] == 512
        assert (a["max_seqlen_q"], len(a["seqused_k"])) == (1, len(a["q"]))
        found, _ = sparse_kernel(a["q"], slots_of(cache[:, :, 0], "auto"), lists.long(), a["softmax_scale"])
        a["out"].copy_(found)
        a["out"][(lists == -1).all(dim=1)] = torch.nan

    function = f"{_MODULE.replace('.', '/')}.py:unified_attention_sparse_mla"
    call = recorded("amd-aiter 0.1.21.dev46+ge4048607a", function, call)
    installed(_MODULE, unified_attention_sparse_mla=call)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("page", [16, 64])
def test_conventions(page: int, selects: Any) -> None:
    selects(AiterTritonSparseBackend, "auto", page=page, heads=16, lse=False)
