"""The adapter against a stand-in of vLLM's FlashAttention 3 over pages of one token."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.flash_attn_mla_sparse import FlashAttnMLASparseBackend

_MODULE, _CALL = "vllm.vllm_flash_attn.flash_attn_interface", "flash_attn_varlen_func"
_SIGNATURE = "vllm 0.33.0", f"vllm/vllm_flash_attn/flash_attn_interface.py:{_CALL}"


@pytest.fixture
def calls(recorded: Any, installed: Any, sparse_kernel: Any) -> list[Any]:
    """What the library is handed; it reads as many entries of a block table as ``seqused_k`` says."""
    seen: list[Any] = []

    def run(a: Any) -> Any:
        seen.append(a)
        assert (a["q"].shape[-1], a["q_v"].shape[-1], a["k"].shape[1:], a["v"].shape[1:]) == (
            64,
            512,
            (1, 1, 64),
            (1, 1, 512),
        )
        assert a["k"].untyped_storage().data_ptr() == a["v"].untyped_storage().data_ptr()
        assert a["cu_seqlens_q"].tolist() == [*range(len(a["q"]) + 1)] and a["max_seqlen_q"] == 1
        assert (a["fa_version"], a["causal"], a["return_softmax_lse"]) == (3, True, None)
        assert a["block_table"].dtype == a["seqused_k"].dtype == torch.int32
        lists, columns = a["block_table"], a["block_table"].shape[1]
        behind = torch.arange(columns) >= a["seqused_k"][:, None]
        assert a["max_seqlen_k"] == columns and bool((lists[behind] == -1).all()) and bool((lists[~behind] >= 0).all())
        keys = torch.cat((a["v"], a["k"]), dim=-1)[:, 0, 0].double()
        output, _ = sparse_kernel(torch.cat((a["q_v"], a["q"]), dim=-1), keys, lists, a["softmax_scale"])
        return output

    installed(_MODULE, **{_CALL: recorded(*_SIGNATURE, run)})
    return seen


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    "asked",
    [
        {"layout": "auto", "page": 16, "heads": 2, "topk": 63, "length": True},
        {"layout": "auto", "heads": 2, "rope": 0, "dtype": torch.float16},
        {"layout": None, "heads": 2, "topk": 1},
    ],
)
def test_conventions(asked: Any, selects: Any) -> None:
    selects(FlashAttnMLASparseBackend, **asked, lse=False)


@pytest.mark.parametrize(("behind", "copied"), [(2 * 576, False), (8, True)])
def test_slots_are_renumbered_where_other_layers_lie_between_blocks(
    behind: int, copied: bool, selects: Any, calls: Any
) -> None:
    """A cache of pages of two tokens, of which another layer's lie behind each, or something odd."""
    backend = selects(FlashAttnMLASparseBackend, "auto", heads=2, lse=False)
    backend._sparse_metadata.query_lens_cpu = torch.ones(1, dtype=torch.int32)
    cache = torch.zeros(4, 2 * 576 + behind).bfloat16()[:, : 2 * 576].unflatten(1, (2, 576))
    indices = torch.tensor([[7, -1, 2, 0]], dtype=torch.int32)
    backend.run_sparse_decode(torch.zeros(1, 2, 576).bfloat16(), cache, torch.tensor(1.0), indices, False)
    assert calls[-1]["block_table"].tolist() == [[7, 2, 0, -1] if copied else [13, 4, 0, -1]]
    assert (calls[-1]["v"].data_ptr() != cache.data_ptr()) is copied and len(calls[-1]["v"]) == (8 if copied else 14)
