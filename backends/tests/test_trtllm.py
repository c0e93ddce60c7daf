"""TRTLLM against a wrapper that computes golden values behind each recorded signature."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import make_dataclass
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import loading, references
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.vocabulary import capabilities

MODULE = "tensorrt_llm._torch.attention_backend.trtllm"
SIZES = ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "predicted_tokens_per_seq"]
NAMES: dict[str, Any] = {
    "MLAParams": make_dataclass("MLAParams", [(name, int) for name in SIZES], kw_only=True),
    "QuantConfig": SimpleNamespace,
    "AttentionInputType": IntEnum("AttentionInputType", ["mixed", "context_only", "generation_only"], start=0),
    "PredefinedAttentionMask": Enum("PredefinedAttentionMask", {"CAUSAL": "causal", "FULL": "full"}),
}


def adapters(device: str) -> list[Any]:
    reference = references.parse_reference(f"TRTLLM[{device}]")
    return [loading.load_role(reference, role) for role in (Role.PREFILL, Role.DECODE)]


def context(a: Any, q: Tensor, scale: float) -> Any:
    """Rows of v as wide as what the projection computes; codes of q, k and v if the cache has them."""
    mla, heads, rows = a["mla_params"], q.shape[1], int(a["sequence_length"].sum())
    assert a["latent_cache"] is a["q_pe"] is None and a["num_kv_heads"] == heads
    assert len(q) * a["chunked_prefill_buffer_batch_size"] >= rows and a["k"].is_contiguous()
    assert a["v"].shape == (rows, heads * mla.v_head_dim) and a["v"].stride(1) == 1
    wide = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.v_head_dim, 1)
    operands = [q, a["k"].view(rows, heads, -1), a["v"].as_strided((rows, heads, mla.v_head_dim), wide)]
    if a["quant_config"]:
        assert a["quant_config"].kv_cache_quant_algo == "FP8"
        operands = [(x.float() * a["kv_scale_orig_quant"]).to(torch.float8_e4m3fn) for x in operands]
        scale *= float(a["kv_scale_quant_orig"]) ** 2
    return *operands, a["context_lengths"], a["sequence_length"], scale, a["attention_mask"].name == "CAUSAL"


def generation(a: Any, q: Tensor, scale: float) -> Any:
    """Pages by their numbers, from an address."""
    queries, lengths, offsets = a["context_lengths"], a["sequence_length"], a["kv_cache_block_offsets"]
    assert queries.tolist() == [a["mla_params"].predicted_tokens_per_seq] * len(queries) and a["num_kv_heads"] == 1
    assert a["cu_q_seqlens"].tolist() == [0, *(queries.cumsum(0) * q.shape[1]).tolist()]
    assert a["cu_kv_seqlens"].tolist() == [0, *lengths.cumsum(0).tolist()] and not a["fmha_scheduler_counter"].any()
    assert a["latent_cache"].shape == q[:, 0].shape and a["q_pe"].data_ptr() == q[..., 512:].data_ptr()
    assert offsets.dim() == 4 and all(a["block_ids_per_seq"].equal(each) for each in offsets[0].unbind(1))
    shape, tables = (int(offsets.max()) + 1, a["tokens_per_block"], 576), offsets[0, :, 0]
    memory = (ctypes.c_char * (math.prod(shape) * 2)).from_address(int(a["host_kv_cache_pool_pointers"][0, 0]))
    pages = torch.frombuffer(memory, dtype=q.dtype).view(shape)
    used = zip(tables.tolist(), lengths.tolist(), strict=True)
    keys = torch.cat([pages[row[: -(-n // shape[1])]].flatten(0, 1)[:n] for row, n in used])[:, None]
    return q, keys, keys[..., :512], queries, lengths, scale, True


def operator(a: Any, device: str, kernel: Any) -> None:
    generates, lengths, heads = a["attention_input_type"] == 2, a["sequence_length"], a["num_heads"]
    assert a["host_request_types"].tolist() == [int(generates)] * len(lengths) and a["is_fused_qkv"] == generates
    assert lengths.equal(a["host_past_key_value_lengths"]) and a["max_sequence_length"] >= lengths.max()
    assert a["host_total_kv_lens"].tolist() == [0, lengths.sum()][:: 1 if generates else -1]
    assert a["context_lengths"].equal(a["host_context_lengths"]) and a["max_num_requests"] >= len(lengths)
    assert a["max_context_length"] >= a["context_lengths"].max() and not a["host_kv_cache_pool_mapping"].any()
    root, q = math.sqrt(a["mla_params"].qk_nope_head_dim + 64), a["q"].view(-1, heads, a["head_size"])
    *operands, queries, keys, scale, causal = (generation if generates else context)(a, q, 1 / (a["q_scaling"] * root))
    starts = (pad(x.cumsum(0), (1, 0)) for x in (queries, keys))
    output, lse = kernel(*operands, *starts, scale, causal)
    output[empty := lse[0] == -math.inf] = math.nan
    a["output"].copy_(output.flatten(1))
    if (stats := a["softmax_stats_tensor"]) is not None:
        stats[..., 0], stats[..., 1] = (lse.mT - math.log(2.5)) * (a["q_scaling"] if device == "sm90" else 1), 2.5
        stats[empty] = math.nan


@pytest.fixture
def library(recorded: Any, installed: Any, kernel: Any) -> Callable[..., None]:
    def install(device: str, label: str) -> None:
        def told(a: Any) -> None:
            vars(a["self"]).update(told := {name: value for name, value in a.items() if name != "self"})
            if "output" in told:
                operator(vars(a["self"]), device, kernel)

        path, names = f"{MODULE.replace('.', '/')}.py:TrtllmAttentionWrapper", "__init__ update_quant_config plan run"
        methods = {name: recorded(f"tensorrt-llm {label}", f"{path}.{name}", told) for name in names.split()}
        installed(MODULE, TrtllmAttentionWrapper=type("TrtllmAttentionWrapper", (), methods), **NAMES)

    return install


PREFILLS = """
new_tokens:heads=2;q=[1,7,64,129];data=needle;lse=0
lse:heads=2;q=[4]
head_counts:call=context_chunk;heads=20;q=[5];kv=[40]
empty_rows:call=context_chunk;heads=2;q=[0,1,0,1];kv=[9,17,33,5]
context_chunk:heads=2;q=[5,9,3];kv=[64,0,300];data=needle
chunked_context:heads=2;q=[5,1];kv=[5,300];workspace=128
softmax_scale:call=context_chunk;heads=2;q=[3,40];kv=[200,9];scale=50
out_tensor:heads=2;q=[5,64];layout=sliced;lse=0;out=1
fp8_operands:dtype=e4m3;heads=2;q=[1,7,64];data=needle
"""
DECODES = """
decode:heads=2;q=[4,4];kv=[30,70];page=64;data=needle;lse=0
decode_lse:call=decode;heads=2;q=[1,1];kv=[300,70];page=64
decode_multi_token:call=decode;heads=2;q=[4,4];kv=[0,63];page=64
paged_cache:call=decode;heads=2;q=[1,1];kv=[127,62];page=32;tails=minus;layers=2
dcp:call=decode;heads=2;q=[1,1];kv=[64,5];page=64;ranks=2
memory_bounds:call=decode;heads=2;q=[1,1];kv=[64,5];page=64;pad=2;tails=minus
"""


@pytest.mark.parametrize(("device", "label"), [("sm90", "f3de61e7"), ("sm100", "3e323973")])
def test_right_ones_pass(device: str, label: str, library: Any, passes: Any) -> None:
    """In what is claimed: on Hopper no LSE of a decode, and pages of 64 tokens alone; nowhere caches in e4m3."""
    library(device, label)
    assert [adapter.broken_dependencies() for adapter in adapters(device)] == [[], []]
    passes(f"TRTLLM[{device}]", Role.PREFILL, *PREFILLS.split())
    claimed = [case for case in DECODES.split() if device == "sm100" or ":call=decode" not in case]
    subject = passes(f"TRTLLM[{device}]", Role.DECODE, *claimed)
    assert all(bool(subject.unsupported(Case.parse(case))) == (case not in claimed) for case in DECODES.split())
    assert "kv_cache_dtype fp8 not supported" in subject.unsupported(capabilities.CAPABILITIES["kv_cache_fp8"].cases[0])


@pytest.mark.parametrize("attributes", [{}, {"TrtllmAttentionWrapper": SimpleNamespace(run=lambda q, k, v: None)}])
def test_other_versions_say_so(attributes: Any, installed: Any) -> None:
    installed(MODULE, **attributes)
    for adapter in adapters("sm90"):
        (reason,) = adapter.broken_dependencies()
        assert reason.startswith("package tensorrt-llm ") and "called otherwise" in reason
