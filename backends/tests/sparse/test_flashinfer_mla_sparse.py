"""The adapter against a stand-in that follows FlashInfer's documentation; the kernel itself needs Blackwell."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.flashinfer_mla_sparse import FlashInferMLASparseBackend

_FUNCTION = "flashinfer/mla/_core.py:trtllm_batch_decode_with_kv_cache_mla"


@pytest.fixture
def library(recorded: Any, installed: Any, sparse_kernel: Any) -> None:
    """Slots of one query token a request, as many as ``seq_lens`` says; LSE [T, N] of the base that is asked for."""

    def decode(a: Any) -> Any:
        q, cache, table = a["query"], a["kv_cache"], a["block_tables"]
        tokens, queries, heads, _ = q.shape
        columns = a["sparse_mla_top_k"]
        assert queries == 1 and table.shape == (tokens, 1, columns) and a["max_seq_len"] == columns
        assert cache.shape[1:] == (1, 64, 576) and q.is_contiguous() and cache.is_contiguous()
        assert (a["backend"], a["return_lse"], a["return_lse_base"]) == ("trtllm-gen", True, "basee")
        assert (a["qk_nope_head_dim"], a["kv_lora_rank"], a["qk_rope_head_dim"], a["bmm2_scale"]) == (128, 512, 64, 1.0)
        assert not a["workspace_buffer"].any() and a["workspace_buffer"].numel() > 8 * 256 * heads * tokens
        assert a["seq_lens"].dtype == table.dtype == torch.int32
        counted = torch.arange(columns) < a["seq_lens"][:, None]
        assert bool((table[:, 0][counted] >= 0).all())
        lists = table[:, 0].long().masked_fill(~counted, -1)
        output, lse = sparse_kernel(q[:, 0], cache[:, 0].flatten(0, 1), lists, a["bmm1_scale"])
        return output[:, None], lse

    installed(
        "flashinfer.mla",
        trtllm_batch_decode_with_kv_cache_mla=recorded("flashinfer-python 0.7.2.post1", _FUNCTION, decode),
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("length", [False, True])
def test_conventions(length: Any, selects: Any) -> None:
    # What it returns without keys, its documentation does not say.
    selects(FlashInferMLASparseBackend, "auto", heads=2, topk=100, length=length, keyless=False)
