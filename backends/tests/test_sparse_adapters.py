"""Sparse adapters against stand-ins: kernels that follow a library's documented conventions, behind its signature."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.roles import Role
from mla_conformance.reference.selected import selected_attention

FLASHINFER = "flashinfer-python 0.7.2.post1"
LATENT, LAYOUTS = 512, {656: "fp8_ds_mla", 584: "fp8_v4"}


def attended(q: Tensor, keys: Tensor, lists: Tensor, scale: float, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of q [T, N, D], keys [S, D] and numbers of them [T, K], or -1: output [T, N, L] of q's dtype, LSE [T, N]."""
    state = selected_attention(q, keys[:, None], keys[:, None, :LATENT], lists, scale=scale, sink=sink)
    return state.output.to(q.dtype), state.lse.mT.float()


def slots_of(cache: Tensor, layout: str) -> Tensor:
    """Every slot of a cache [blocks, page, width] of a layout, as a kernel reads it: [S, D]."""
    slots = torch.arange(cache.shape[0] * cache.shape[1])
    return dequantise(gather(cache, slots, layout), layout, torch.tensor(1.0), torch.bfloat16)


def cut(lists: Any, length: Any) -> Any:
    behind = None if length is None else torch.arange(lists.shape[1]) >= length[:, None]
    return lists.long() if behind is None else lists.long().masked_fill(behind, -1)


@pytest.fixture
def aiter(provided: Any) -> None:
    """Lists of slots; NaN in a row whose list names none."""

    def call(a: Any) -> None:
        cache, lists = a["kv"], a["topk_indices"]
        assert cache.shape[2] == 1 and lists.is_contiguous() and a["q"].is_contiguous() and a["kv_lora_rank"] == 512
        assert (a["max_seqlen_q"], len(a["seqused_k"])) == (1, len(a["q"]))
        found, _ = attended(a["q"], slots_of(cache[:, :, 0], "auto"), lists.long(), a["softmax_scale"])
        a["out"].copy_(found)
        a["out"][(lists == -1).all(dim=1)] = torch.nan

    name = "unified_attention_sparse_mla"
    provided("amd-aiter 0.1.21.dev46+ge4048607a", f"aiter.ops.triton.attention.{name}", {name: call})


@pytest.fixture
def flash_attn(provided: Any) -> list[Any]:
    """What vLLM's FlashAttention 3 is handed over pages of one token, as many of a table as ``seqused_k`` says."""
    seen: list[Any] = []

    def run(a: Any) -> Any:
        seen.append(a)
        assert (a["q"].shape[-1], a["q_v"].shape[-1]) == (64, 512)
        assert (a["k"].shape[1:], a["v"].shape[1:]) == ((1, 1, 64), (1, 1, 512))
        assert a["k"].untyped_storage().data_ptr() == a["v"].untyped_storage().data_ptr()
        assert a["cu_seqlens_q"].tolist() == [*range(len(a["q"]) + 1)] and a["max_seqlen_q"] == 1
        assert (a["fa_version"], a["causal"], a["return_softmax_lse"]) == (3, True, None)
        assert a["block_table"].dtype == a["seqused_k"].dtype == torch.int32
        lists, columns = a["block_table"], a["block_table"].shape[1]
        behind = torch.arange(columns) >= a["seqused_k"][:, None]
        assert a["max_seqlen_k"] == columns and bool((lists[behind] == -1).all()) and bool((lists[~behind] >= 0).all())
        keys = torch.cat((a["v"], a["k"]), dim=-1)[:, 0, 0].double()
        output, _ = attended(torch.cat((a["q_v"], a["q"]), dim=-1), keys, lists, a["softmax_scale"])
        return output

    provided("vllm 0.33.0", "vllm.vllm_flash_attn.flash_attn_interface", {"flash_attn_varlen_func": run})
    return seen


@pytest.fixture
def flash_mla(provided: Any) -> None:
    """64 or 128 heads; natural LSE, +inf without keys. A request has one query token, its list and its length."""

    def source(cache: Any, indices: Any, length: Any) -> Any:
        assert indices.shape[1] == 1 and indices.shape[2] % 64 == 0
        assert cache.shape[2] == 1 and cache.stride(1) == cache.shape[3]
        assert length is None or (length.dtype == torch.int32 and length.is_contiguous())
        return slots_of(cache[:, :, 0], LAYOUTS[cache.shape[3]]), cut(indices[:, 0], length)

    def decode(a: Any) -> Any:
        q, cache = a["q"], a["k_cache"]
        assert a["use_legacy"] and a["tile_scheduler_metadata"] == "schedule" and not a["causal"]
        assert q.shape[1] == 1 and q.shape[2] in (64, 128) and a["head_dim_v"] == 512
        assert (q.shape[3], cache.shape[3]) in ((576, 656), (512, 584))
        keys, lists = source(cache, a["indices"], a["topk_length"])
        assert cache.shape[3] != 656 or a["topk_length"] is a["extra_k_cache"] is None
        if a["extra_k_cache"] is not None:
            more, others = source(a["extra_k_cache"], a["extra_indices_in_kvcache"], a["extra_topk_length"])
            lists = torch.cat((lists, torch.where(others < 0, -1, others + len(keys))), dim=1)
            keys = torch.cat((keys, more))
        output, lse = attended(q[:, 0], keys, lists, a["softmax_scale"], a["attn_sink"])
        return output[:, None], lse.masked_fill(lse == -math.inf, math.inf)[:, :, None]

    def prefill(a: Any) -> Any:
        q, kv, indices, length = a["q"], a["kv"], a["indices"], a["topk_length"]
        assert a["use_legacy"] and a["d_v"] == 512 and q.shape[1] in (64, 128) and kv.shape[1] == 1
        assert indices.shape[1] == 1 and indices.shape[2] % 128 == 0
        assert length is None or (length.dtype == torch.int32 and length.is_contiguous())
        output, lse = attended(q, kv[:, 0], cut(indices[:, 0], length), a["sm_scale"], a["attn_sink"])
        return output, lse, lse.masked_fill(lse == -math.inf, math.inf)

    calls = {"get_mla_metadata": lambda a: ("schedule", None), "flash_mla_with_kvcache": decode}
    calls["flash_mla_sparse_fwd"] = prefill
    named = {f"flash_mla/flash_mla_interface.py:{name}": call for name, call in calls.items()}
    provided("sgl-flash-mla 1.0.0", "flash_mla", named)


@pytest.fixture
def trtllm(provided: Any) -> None:
    """Slots of one query token a request, as many as ``seq_lens`` says; LSE [T, N] of the base that is asked for."""

    def decode(a: Any) -> Any:
        q, cache, table, columns = a["query"], a["kv_cache"], a["block_tables"], a["sparse_mla_top_k"]
        tokens, queries, heads, _ = q.shape
        assert queries == 1 and table.shape == (tokens, 1, columns) and a["max_seq_len"] == columns
        assert cache.shape[1:] == (1, 64, 576) and q.is_contiguous() and cache.is_contiguous()
        assert (a["backend"], a["return_lse"], a["return_lse_base"]) == ("trtllm-gen", True, "basee")
        assert (a["qk_nope_head_dim"], a["kv_lora_rank"], a["qk_rope_head_dim"], a["bmm2_scale"]) == (128, 512, 64, 1.0)
        assert not a["workspace_buffer"][:4096].any() and a["workspace_buffer"].numel() > 8 * 256 * heads * tokens
        assert a["seq_lens"].dtype == table.dtype == torch.int32
        lists = cut(table[:, 0], a["seq_lens"])
        assert bool((lists >= 0).sum(dim=1).equal(a["seq_lens"].long()))
        output, lse = attended(q[:, 0], cache[:, 0].flatten(0, 1), lists, a["bmm1_scale"])
        return output[:, None], lse

    provided(FLASHINFER, "flashinfer.mla", {"flashinfer/mla/_core.py:trtllm_batch_decode_with_kv_cache_mla": decode})


@pytest.fixture
def flashinfer(recorded: Any, installed: Any, planned: Any) -> None:
    """A wrapper over pages of one token that is planned on the host for what it runs; natural LSE [T, N]."""
    folder = "flashinfer/mla/_batch_mla"

    def run(wrapper: Any, a: Any) -> Any:
        plan = wrapper.planned
        q, rows = (torch.cat(a[name], dim=-1) for name in ("query", "kv_cache"))
        batch = plan["metadata"]
        assert (plan["query_layout"], plan["kv_cache_layout"], plan["lse_mode"]) == ("split", "split", "basee")
        assert a["return_lse"] and a["return_lse_base_on_e"] and rows.shape[1] == plan["page_size"] == 1
        assert not plan["causal"] and all(batch[name].dtype == torch.int32 for name in batch if name != "cls")
        scaled = rows.dtype == torch.float8_e4m3fn
        assert plan["scale_mode"] == ("kv-per-tensor" if scaled else "default")
        assert a["ckv_scale"] == a["kpe_scale"] and (a["ckv_scale"] is not None) == scaled
        keys = rows[:, 0].double() * (a["ckv_scale"] if scaled else 1.0)
        assert bool((batch["kv_indices"] >= 0).all()) and batch["qo_indptr"].tolist() == [*range(len(q) + 1)]
        named = [batch["kv_indices"][begin:end].long() for begin, end in pairwise(batch["kv_indptr"].tolist())]
        assert batch["kv_len_arr"].tolist() == [*map(len, named)]
        lists = torch.nn.utils.rnn.pad_sequence(named, batch_first=True, padding_value=-1)
        return attended(q, keys, lists, plan["sm_scale"])

    def begin(wrapper: Any, a: Any) -> None:
        assert a["backend"] == "fa3" and a["float_workspace_buffer"].numel() >= 128 << 20

    made = planned(FLASHINFER, f"{folder}/_wrapper.py:BatchMLAPagedAttentionWrapper", run, begin)
    csr = recorded(FLASHINFER, f"{folder}/_contracts.py:MLAPlanMetadata.csr", dict)
    metadata = SimpleNamespace(csr=lambda **fields: csr(None, **fields))
    installed("flashinfer.mla", BatchMLAPagedAttentionWrapper=made, MLAPlanMetadata=metadata)


@pytest.fixture
def sglang(provided: Any) -> None:
    """The launcher, which shares keys where its shapes allow it; the kernel, which takes any dtype, and its lengths."""

    def launch(a: Any) -> Any:
        q, kv = a["q"], a["kv"]
        assert kv.dtype == torch.bfloat16 and kv.shape[1] == 1 and a["d_v"] == 512
        assert q.shape[1] == {0: 3, 2: 16, 4: 8}[a["union"]]
        lists = cut(a["indices"], None if a["union"] else a["topk_length"])
        return attended(q, kv[:, 0], lists, a["sm_scale"])[0]

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def run(q: Any, kv: Any, indices: Any, length: Any, out: Any, scale: Any, topk: Any, **sizes: Any) -> None:
                assert grid == (len(q),) and topk == indices.shape[1] and all(x.is_contiguous() for x in (q, kv, out))
                assert sizes == {"H": 3, "BLOCK_H": 16, "D_QK": 576, "D_V": 512, "BLOCK_N": 64, "IDX64": False}
                out.copy_(attended(q, kv[:, 0], cut(indices, length), scale)[0])

            return run

    def last(indices: Any, topk: int) -> Any:
        return (torch.arange(1, topk + 1) * (indices >= 0)).amax(dim=1).int()

    module, kernel = "sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill", Kernel()
    others = {"_sparse_mla_prefill_kernel": kernel, "_topk_length": last}
    provided("sglang 0.5.23", module, {"sparse_mla_prefill": launch}, **others)


BATCH = "sparse_decode:page=64;q=[1,1,1,1,1];kv=[69,69,69,69,69];fill=ragged;holes=scattered;kscale=250000;topk=128"
"""Lists with holes, of which one names no key."""
ONE_TOKEN = "sparse_decode:q=[1];kv=[9]"
_BARE, _OF_16, _FULL = "call=sparse_prefill;heads=3;lse=0", "heads=16;lse=0", "fill=full;heads=2;topk=100"
_PAGES, _HALF = "page=16;heads=2;topk=63;length=1;behind=huge", "heads=2;dims=128-0-128-512;dtype=fp16"
_ONE, _MIXED = "call=sparse_prefill;heads=2;topk=1", "cache=fp8_ds_mla;heads=64;topk=64;sink=drawn"
_V4, _GATHERED = "cache=fp8_v4;dims=128-0-128-512;length=1;behind=huge", "call=sparse_prefill"
_SECOND = "extra=fp8_v4;extra_page=12;extra_topk=64;sink=drawn"
_LENGTHS = ";length=1;behind=huge"
_OF_FLASH_MLA = [f"{_V4};heads=128", f"{_V4};heads=64;page=6;{_SECOND}", f"{_GATHERED};heads=64;sink=drawn{_LENGTHS}"]
_OF_FLASH_MLA += [f"{_GATHERED};heads=128;dims=128-0-128-512"]
_INTERPRETED = [f"{_BARE};dtype={dtype}{length}" for length in ("", _LENGTHS) for dtype in ("fp16", "fp32")]
ASKED: dict[str, tuple[str, list[str]]] = {
    "AITER_TRITON_SPARSE": ("aiter", [f"{_OF_16};page=16", f"{_OF_16};page=64"]),
    "FLASH_ATTN_MLA_SPARSE": ("flash_attn", [f"{asked};lse=0" for asked in (_PAGES, _HALF, _ONE)]),
    "FLASHMLA_SPARSE": ("flash_mla", [f"{_MIXED};scales=pow2", *_OF_FLASH_MLA]),
    "FLASHMLA_SPARSE[float32]": ("flash_mla", [_MIXED]),
    # What it returns without keys, its documentation does not say.
    "FLASHINFER_MLA_SPARSE": ("trtllm", [_FULL, _FULL + _LENGTHS]),
    "FLASHINFER_MLA_SPARSE_SM90": ("flashinfer", [_PAGES, _HALF, "cache=fp8;heads=2", _ONE]),
    "SGLANG_TRITON_SPARSE": ("sglang", [_BARE + _LENGTHS, _BARE]),
    "SGLANG_TRITON_SPARSE[union2]": ("sglang", [f"{_GATHERED};{_OF_16}"]),
    "SGLANG_TRITON_SPARSE[union4]": ("sglang", [f"{_GATHERED};heads=8;lse=0"]),
    "SGLANG_TRITON_SPARSE[interpreted]": ("sglang", _INTERPRETED),
}


def of_batch(asked: str) -> str:
    name, _, fields = BATCH.partition(":")
    given = dict(field.split("=") for field in (*fields.split(";"), *asked.split(";")))
    return f"{name}:{';'.join(f'{field}={value}' for field, value in given.items())}"


@pytest.mark.parametrize("name", ASKED)
def test_conventions(name: str, passes: Any, request: Any) -> None:
    stand_in, asked = ASKED[name]
    request.getfixturevalue(stand_in)
    passes(name, Role.SPARSE, *map(of_batch, asked))


@pytest.mark.parametrize(("behind", "copied"), [(2 * 576, False), (8, True)])
def test_slots_are_renumbered_where_other_layers_lie_between_blocks(
    behind: int, copied: bool, passes: Any, prepared: Any, flash_attn: Any
) -> None:
    """A cache of pages of two tokens, of which another layer's lie behind each, or something odd."""
    backend, _ = prepared(passes("FLASH_ATTN_MLA_SPARSE", Role.SPARSE), f"{ONE_TOKEN};heads=2;lse=0")
    cache = torch.zeros(4, 2 * 576 + behind).bfloat16()[:, : 2 * 576].unflatten(1, (2, 576))
    indices = torch.tensor([[7, -1, 2, 0]], dtype=torch.int32)
    backend.run_sparse_decode(torch.zeros(1, 2, 576).bfloat16(), cache, torch.tensor(1.0), indices, False)
    seen = flash_attn[-1]
    assert seen["block_table"].tolist() == [[7, 2, 0, -1] if copied else [13, 4, 0, -1]]
    assert (seen["v"].data_ptr() != cache.data_ptr()) is copied and len(seen["v"]) == (8 if copied else 14)


@pytest.mark.usefixtures("flash_mla")
def test_refuses_what_it_does_not_take_before_it_calls(passes: Any, prepared: Any) -> None:
    asked = f"{ONE_TOKEN};heads=64;cache=fp8_ds_mla;scales=pow2;length=1"
    backend, call = prepared(passes("FLASHMLA_SPARSE", Role.SPARSE), asked)
    with pytest.raises(UnsupportedConfiguration, match="topk_length of lists over fp8_ds_mla"):
        call.invoke(backend, None)


@pytest.mark.usefixtures("flashinfer")
def test_a_call_is_planned_for_its_own_lists(passes: Any, prepared: Any) -> None:
    subject = passes("FLASHINFER_MLA_SPARSE_SM90", Role.SPARSE)
    backend, call = prepared(subject, f"{ONE_TOKEN};heads=2;call=sparse_prefill")
    call.invoke(backend, None)
    wrapper = backend._wrapper
    q, cache = torch.zeros(1, 2, 576).bfloat16(), torch.zeros(4, 1, 576).bfloat16()
    backend.run_sparse_prefill(q, cache, torch.tensor([[3, -1, 2]], dtype=torch.int32), False)
    assert backend._wrapper is wrapper and wrapper.planned["metadata"]["kv_indices"].tolist() == [3, 2]
