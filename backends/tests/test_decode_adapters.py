"""Decode adapters against stand-ins: kernels that follow a library's documented conventions, behind its signature."""

import math
from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from mla_conformance.backends import loading, references
from mla_conformance.backends.roles import Role

Kernel = Callable[..., Any]
_ONE_EACH = "q=[1,1];kv=[64,129];pad=1"
UNIFORM, SINGLE = (_ONE_EACH, "q=[3,3];kv=[61,126]"), (_ONE_EACH, "q=[1,1,1];kv=[0,63,62]")
MANY = _ONE_EACH, "q=[4,1,3];kv=[61,16,1]"


def without_keys(found: Any, left: float = -math.inf) -> Any:
    """What a library leaves in rows without keys: NaN, and for an LSE what it may be."""
    output, lse = found
    empty = lse[0] == -math.inf
    output[empty], lse[:, empty] = math.nan, left
    return output, lse


def triton_mla(a: Any, kernel: Any) -> None:
    """A row of q is a request of one token."""
    q, cache, page = a["q"], a["k_buffer"], a["page_size"]
    assert (cache.shape[1:], a["v_buffer"].shape[1:]) == ((page, 1, 576), (page, 1, 512)) and a["is_mla"]
    assert a["v_buffer"].data_ptr() == cache.data_ptr() and a["k_scale"] is a["v_scale"]
    assert a["attn_logits"].shape == (*q.shape[:2], a["num_kv_splits"], 513)
    found = kernel(q, cache[:, :, 0], a["b_seq_len"].tolist(), [1] * len(q), a["req_to_token"], a["sm_scale"])
    output, lse = without_keys(found)
    a["o"].copy_(output)
    a["lse"].copy_(lse.mT)


def flash_mla(a: Any, kernel: Any) -> Any:
    """Queries [B, S, N, L + R], pages of 64; LSE [B, N, S]."""
    q, cache = a["q"], a["k_cache"]
    assert a.get("use_legacy") is (True if "use_legacy" in a else None)
    assert a["num_splits"] is None and a["tile_scheduler_metadata"] == "schedule" and a["head_dim_v"] == 512
    assert cache.shape[1:] == (64, 1, 576) and a["causal"] == (q.shape[1] > 1)
    shape = q.shape[:2]
    sizes, lengths = [shape[1]] * shape[0], a["cache_seqlens"].tolist()
    found = kernel(q.flatten(0, 1), cache[:, :, 0], lengths, sizes, a["block_table"], a["softmax_scale"])
    output, lse = without_keys(found, math.inf)
    return output.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)


def aiter(a: Any, kernel: Any) -> None:
    """Causal, over pages of one head; without a key, whatever stood in the output."""
    cache, lengths = a["kv_buffer"], a["seqused_k"].tolist()
    assert cache.shape[1:] == (64, 1, 576) and a["causal"] and a["q_descale"] is a["kv_descale"] is None
    assert (a["kv_lora_rank"], a["qk_rope_head_dim"], a["max_seqlen_kv"]) == (512, 64, max(lengths))
    queries = a["cu_seqlens_q"].diff()
    found = kernel(a["q"], cache[:, :, 0], lengths, queries, a["block_tables"], a["softmax_scale"])
    a["out"].copy_(without_keys(found)[0])


class QuantPolicy(IntEnum):
    NONE = 0


def lmdeploy(a: Any, kernel: Any) -> Any:
    """Values that share the memory of the keys."""
    keys, values, lengths = a["k_cache"], a["v_cache"], a["cache_seqlens"].tolist()
    assert keys.shape[1:] == (64, 1, 576) and values.shape[1:] == (64, 1, 512)
    assert keys.data_ptr() == values.data_ptr() and a["quant_policy"] == QuantPolicy.NONE
    assert a["k_scales_zeros"] is a["v_scales_zeros"] is None
    found = kernel(a["q"], keys[:, :, 0], lengths, [1] * len(lengths), a["page_table"], a["softmax_scale"])
    return without_keys(found)[0]


def sglang(a: Any, kernel: Any) -> None:
    """Slots of one token; the LSE of the first split is that of all keys, the others have none."""
    q, slots = a["q"], a["k_buffer"]
    assert (slots.shape[1:], a["v_buffer"].shape[1:]) == ((1, 576), (1, 512))
    assert a["has_mla"] and (a["k_scale"], a["v_scale"]) == (1.0, 1.0)
    assert a["attn_lse"].shape == (*q.shape[:2], a["max_kv_splits"]) and bool((a["attn_lse"] == -math.inf).all())
    assert a["attn_logits"].shape == (*q.shape[:2], a["max_kv_splits"], 512)
    assert a["num_kv_splits"].dtype == a["kv_indptr"].dtype == torch.int32
    tables = [a["kv_indices"][i:j].tolist() for i, j in pairwise(a["kv_indptr"].tolist())]
    found = kernel(q, slots, [*map(len, tables)], [1] * len(q), tables, a["sm_scale"])
    output, lse = without_keys(found)
    a["o"].copy_(output)
    a["attn_lse"][..., 0] = lse.mT


def flash_attn_mla(a: Any, kernel: Any) -> Any:
    """Rope and latent apart, of one tensor; bottom-right; natural LSE [N, T]."""
    in_vllm = ("k", "v", "q_v", "seqused_k", "block_table")
    names = in_vllm if "q_v" in a else ("k_cache", "v_cache", "qv", "cache_seqlens", "page_table")
    k, v, qv, lengths, table = (a[name] for name in names)
    assert (k.shape[2:], v.shape[2:], qv.shape[-1]) == ((1, 64), (1, 512), 512)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert a["causal"] and a["return_softmax_lse"] and a["max_seqlen_q"] == int(a["cu_seqlens_q"].diff().max())
    assert names is not in_vllm or (a["fa_version"], a["max_seqlen_k"]) == (3, int(lengths.max()))
    pages, queries = torch.cat([v, k], dim=-1)[:, :, 0], a["cu_seqlens_q"].diff().tolist()
    return kernel(torch.cat([qv, a["q"]], dim=-1), pages, lengths.tolist(), queries, table, a["softmax_scale"])


def tokenspeed(a: Any, kernel: Any) -> Any:
    """Queries [B, S, N, L + R]; LSE to base 2, [B, S, N]."""
    q, cache, lengths = a["query"], a["kv_cache"], a["seq_lens"].tolist()
    requests, queries, heads, _ = q.shape
    assert a["return_lse"] and a["causal_mask"] and a["max_seq_len"] > 0
    assert (a["kv_lora_rank"], a["qk_rope_head_dim"]) == (512, 64)
    # What its docstring asks for, at the splits that its heuristic makes on 148 processors.
    tiles = -(-heads * queries // 128)
    splits, workspace = max(1, min(32, 148 // requests // (tiles * 2))), a["workspace_buffer"]
    assert workspace.dtype == torch.int8 and workspace.numel() >= requests * 128 * tiles * splits * 513 * 4
    assert a["block_tables"].is_contiguous() and a["seq_lens"].dtype == torch.int32
    sizes = [queries] * requests
    output, lse = kernel(q.flatten(0, 1), cache, lengths, sizes, a["block_tables"], a["softmax_scale"])
    return output.unflatten(0, (requests, queries)), (lse / math.log(2)).mT.unflatten(0, (requests, queries))


def workspace_size(a: Any, kernel: Any) -> int:
    assert a["max_seq_len"] % 128 == 0 and a["sm_count"] == 0 and a["num_kv_splits"] == -1
    return 4096


def cutlass(a: Any, kernel: Any) -> Any:
    """128 heads, one query token a request; natural LSE [B, 128]."""
    q_nope, q_pe, cache, table = a["q_nope"], a["q_pe"], a["kv_c_and_k_pe_cache"], a["page_table"]
    tokens = q_nope.shape[0]
    assert (q_nope.shape, q_pe.shape) == ((tokens, 128, 512), (tokens, 128, 64))
    assert a["out"].shape == (tokens, 128, 512) and a["lse"].shape == (tokens, 128)
    assert all(x.is_contiguous() for x in (q_nope, q_pe, table, a["out"], a["lse"]))
    assert a["workspace"].dtype == torch.uint8 and a["workspace"].numel() == 4096 and a["num_kv_splits"] == -1
    # The heads of padding are the same in each row: two stand for all of them.
    query = torch.cat([q_nope, q_pe], dim=-1)
    assert not query[:, 2:].any()
    found = kernel(query[:, :2], cache, a["seq_lens"].tolist(), [1] * tokens, table, a["scale"])
    output, lse = without_keys(found, math.inf)
    a["out"].copy_(pad(output, (0, 0, 0, 126)))
    a["lse"].copy_(pad(lse, (0, 0, 0, 126)).mT)
    return a["out"]


_AITER, _AITER_PACKAGE = "aiter.ops.triton.attention.mla", "amd-aiter 0.1.21.dev46+ge4048607a"
_FLASH_MLA = "flash_mla", "flash_mla/flash_mla_interface.py:flash_mla_with_kvcache", flash_mla, [64], UNIFORM
_VLLM, _VLLM_FA = "vllm.v1.attention.ops.triton_decode_attention", "vllm.vllm_flash_attn.flash_attn_interface"
_PAGED, _SGLANG = "lmdeploy.pytorch.kernels.cuda.pagedattention", "sglang.kernels.ops.attention.decode_attention"
_DECODE, _KV_CACHE, _FA = "decode_attention_fwd", "flash_attn_with_kvcache", (flash_attn_mla, [16, 64], MANY)
_TOKENSPEED, _OF_128 = "tokenspeed_mla/mla_decode.py:tokenspeed_mla_decode", ["q=[1,1];kv=[128,259];pad=1"]
STAND_INS: dict[str, tuple[str, str, Kernel, list[int], Any]] = {
    "TRITON_MLA[lse-float32] vllm 0.33.0": (_VLLM, _DECODE, triton_mla, [16, 32], UNIFORM),
    "FLASHMLA sgl-flash-mla 1.0.0": _FLASH_MLA,
    "FLASHMLA flash-mla 1.0.0+9241ae3": _FLASH_MLA,
    f"AITER_TRITON_MLA {_AITER_PACKAGE}": (_AITER, "mla_decode_fwd", aiter, [64], (*UNIFORM, *SINGLE)),
    f"AITER_TRITON_MLA[prefill] {_AITER_PACKAGE}": (_AITER, "mla_prefill_fwd", aiter, [64], MANY),
    "LMDEPLOY_TRITON lmdeploy 0.18.0": (_PAGED, _KV_CACHE, lmdeploy, [64], SINGLE),
    "SGLANG_TRITON sglang 0.5.23": (_SGLANG, _DECODE, sglang, [32], SINGLE),
    "FLASH_ATTN_MLA[upstream] flash-attn-3 3.0.0+0251105a": ("flash_attn_interface", _KV_CACHE, *_FA),
    "FLASH_ATTN_MLA[sglang] sglang-kernel 0.4.10": ("sgl_kernel.flash_attn", _KV_CACHE, *_FA),
    "FLASH_ATTN_MLA[vllm] vllm 0.33.0": (_VLLM_FA, "flash_attn_varlen_func", *_FA),
    "TOKENSPEED_MLA tokenspeed-mla 2.0.4": ("tokenspeed_mla", _TOKENSPEED, tokenspeed, [32], UNIFORM),
    "CUTLASS_MLA vllm 0.33.0": ("vllm._custom_ops", "sm100_cutlass_mla_decode", cutlass, [128], _OF_128),
}
"""By adapter and recorded package: module, function with its file where that is not the module, what stands for it,
sizes of pages, and batches."""
FURTHER: dict[str, dict[str, Kernel]] = {
    "flash_mla": {"flash_mla/flash_mla_interface.py:get_mla_metadata": lambda a, kernel: ("schedule", None)},
    "vllm._custom_ops": {"sm100_cutlass_mla_get_workspace_size": workspace_size},
}
OTHERS: dict[str, dict[str, Any]] = {
    "flash_mla": {"has_legacy": lambda: True},
    _PAGED: {"QuantPolicy": QuantPolicy},
    "tokenspeed_mla": {"get_num_sm": lambda device: 148},
}


@pytest.fixture
def library(provided: Any, mla_kernel: Any) -> Callable[[str], Any]:
    def install(key: str) -> Any:
        adapter, _, label = key.partition(" ")
        module, function, call, *_ = STAND_INS[key]
        calls = {function: call, **FURTHER.get(module, {})}
        kernels = {name: lambda a, call=call: call(a, mla_kernel) for name, call in calls.items()}
        provided(label, module, kernels, **OTHERS.get(module, {}))
        return loading.load_role(references.parse_reference(adapter), Role.DECODE)

    return install


@pytest.mark.parametrize("key", STAND_INS)
def test_conventions(key: str, library: Any, passes: Any) -> None:
    """Alone, and a small batch behind calls for others."""
    lse, (pages, batches) = "" if library(key).returns_lse else ";lse=0", STAND_INS[key][3:]
    cases = [f"decode:heads=2;page={page};{batch}{lse}" for page, batch in product(pages, batches)]
    small = f"call_order:call=decode;heads=2;page={pages[0]};q=[1,1];kv=[3,9]{lse}"
    passes(key.split()[0], Role.DECODE, *cases, small)


def test_the_lse_is_as_coarse_as_vllm_makes_it(provided: Any, mla_kernel: Any, passes: Any) -> None:
    def coarse(a: Any) -> None:
        assert a["lse"].dtype == torch.bfloat16
        triton_mla(a, mla_kernel)

    provided("vllm 0.33.0", _VLLM, {_DECODE: coarse})
    with pytest.raises(AssertionError, match="LSE is "):
        passes("TRITON_MLA", Role.DECODE, "decode:heads=2;page=16;q=[1];kv=[39]")


@pytest.mark.parametrize("key", [key for key in STAND_INS if key.startswith("FLASHMLA")])
def test_says_which_build_served(key: str, library: Any, passes: Any, prepared: Any) -> None:
    assert library(key).broken_dependencies() == []
    kernel, call = prepared(passes("FLASHMLA", Role.DECODE), "decode:heads=2;page=64;q=[1,1];kv=[64,2]")
    call.invoke(kernel, None)
    assert list(kernel.kernel_evidence()) == (["sgl-flash-mla", "kernels"] if "sgl" in key else ["flash-mla"])
