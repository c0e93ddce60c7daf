"""Prefill adapters against stand-ins: kernels that follow a library's documented conventions, behind its signature."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_conformance.backends import conversions, loading, references, roles
from mla_conformance.backends.kernel import DeviceCapability, UnsupportedConfiguration
from mla_conformance.backends.metadata import prefill_metadata
from mla_conformance.cases import case
from mla_conformance.reference import dimensions


def varlen(a: Any, kernel: Any) -> Any:
    """The call that FlashAttention's packages share: natural LSE [N, T]."""
    q, k, v = a["q"], a["k"], a["v"]
    assert all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 for x in (q, k, v))
    assert all(x.shape[-1] * x.element_size() % 16 == 0 for x in (q, k, v))
    queries, keys = a["cu_seqlens_q"], a["cu_seqlens_k"]
    assert (a["max_seqlen_q"], a["max_seqlen_k"]) == (int(queries.diff().max()), int(keys.diff().max()))
    return kernel(q, k, v, queries, keys, a["softmax_scale"], a["causal"])


def fa2(a: Any, kernel: Any) -> Any:
    """One head dim; +inf in a row without keys."""
    assert a["return_attn_probs"] is True and a["q"].shape[-1] == a["v"].shape[-1]
    output, lse = varlen(a, kernel)
    return output, lse.masked_fill(lse == -math.inf, math.inf), None


def fa3_or_4(a: Any, kernel: Any) -> Any:
    assert a["return_lse" if "return_lse" in a else "return_attn_probs"] is True
    return varlen(a, kernel)


def torchs_own(a: Any, kernel: Any) -> Any:
    asked = {"return_attn_probs": True, "causal": a["is_causal"], "softmax_scale": a["scale"]}
    asked |= {"q": a["query"], "k": a["key"], "v": a["value"], "max_seqlen_q": a["max_q"], "max_seqlen_k": a["max_k"]}
    return (*fa2({**asked, "cu_seqlens_q": a["cum_seq_q"], "cu_seqlens_k": a["cum_seq_k"]}, kernel), None, None)


def efficient(a: Any, kernel: Any) -> Any:
    """Bottom-right for mask 2; LSE [B, N, a multiple of 32]; garbage in rows without keys."""
    assert a["bias"] is None and a["dropout_p"] == 0.0 and a["compute_log_sumexp"]
    queries, operands = a["cu_seqlens_q"], {x: a[name][0] for x, name in (("q", "query"), ("k", "key"), ("v", "value"))}
    mask = {"causal": a["custom_mask_type"] == 2, "softmax_scale": a["scale"]}
    output, lse = varlen({**a, **operands, **mask}, kernel)
    output[lse[0] == -math.inf] = math.nan
    longest = -(-a["max_seqlen_q"] // 32) * 32
    return output[None], padded(lse.nan_to_num(neginf=math.nan), queries, longest).mT, None, None


def padded(lse: torch.Tensor, start: torch.Tensor, longest: int) -> torch.Tensor:
    """[B, longest, N], garbage behind each request."""
    found = torch.full((len(start) - 1, longest, lse.shape[0]), math.nan)
    for request, (first, last) in enumerate(zip(start[:-1].tolist(), start[1:].tolist(), strict=True)):
        found[request, : last - first] = lse[:, first:last].mT
    return found


def cudnn(a: Any, kernel: Any) -> Any:
    """LSE padded to [B, longest, N], garbage where no key is visible; natural before 0.7, then base 2 unless asked."""
    queries, keys = (a[f"actual_seq_lens_{name}"].flatten().cumsum(0) for name in ("q", "kv"))
    queries, keys = (torch.nn.functional.pad(x, (1, 0)) for x in (queries, keys))
    for name, operand, start in (("q", a["q"], queries), ("k", a["k_cache"], keys), ("v", a["v_cache"], keys)):
        assert a[f"batch_offsets_{name}"].flatten().tolist() == (start * operand.stride(0)).tolist()
    output, lse = kernel(a["q"], a["k_cache"], a["v_cache"], queries, keys, a["scale"], a["causal"])
    empty = lse[0] == -math.inf
    output[empty], lse[:, empty] = math.nan, -2e34
    a["out"].copy_(output)
    return a["out"], padded(lse if a.get("lse_base", "ln") == "ln" else lse / math.log(2), queries, _longest(queries))


def trtllm(a: Any, kernel: Any) -> Any:
    """LSE to base 2, [T, N]; strides of q ignored; garbage for a request without keys unless the host tells."""
    assert a["query"].is_contiguous() and a["bmm2_scale"] == 1.0 and not a["workspace_buffer"][:4096].any()
    queries, keys = a["cum_seq_lens_q"], a["cum_seq_lens_kv"]
    assert a["seq_lens"].tolist() == keys.diff().tolist() and a["max_kv_len"] == _longest(keys)
    assert a["max_q_len"] == _longest(queries)
    assert "kv_seq_lens_cpu" not in a or a["kv_seq_lens_cpu"].tolist() == keys.diff().tolist()
    output, lse = kernel(a["query"], a["key"], a["value"], queries, keys, a["bmm1_scale"], a["is_causal"])
    empty = lse[0] == -math.inf
    output[empty], lse[:, empty] = math.nan, 7.0
    return output if a["out"] is None else a["out"].copy_(output), (lse / math.log(2)).mT.contiguous()


def tokenspeed(a: Any, kernel: Any) -> Any:
    """Natural LSE, [T, N]; packed operands only."""
    assert all(a[name].is_contiguous() for name in ("query", "key", "value"))
    queries, keys = a["cum_seq_lens_q"], a["cum_seq_lens"]
    assert (a["max_seq_len_q"], a["max_seq_len"]) == (_longest(queries), _longest(keys))
    assert a["batch_size"] == len(queries) - 1
    output, lse = kernel(a["query"], a["key"], a["value"], queries, keys, a["softmax_scale"], a["is_causal"])
    return output if a["out"] is None else a["out"].copy_(output), lse.mT.contiguous()


def extend(a: Any, kernel: Any) -> None:
    """Either stage of the kernel: new tokens, or a prefix by its slots."""
    assert a["skip_prefix"] != a["skip_extend"] and (a["k_scale"], a["v_scale"], a["page_size"]) == (1.0, 1.0, None)
    assert all(a[name].is_contiguous() for name in ("q_extend", "k_extend", "v_extend", "o_extend"))
    queries = a["qo_indptr"]
    assert queries.dtype == torch.int64 and a["max_len_extend"] == _longest(queries)
    if a["skip_prefix"]:
        assert a["is_causal"] and not len(a["k_buffer"]) and not a["kv_indptr"].any()
        k, v, keys = a["k_extend"], a["v_extend"], queries
    else:
        assert not a["is_causal"] and not len(a["k_extend"])
        k, v, keys = a["k_buffer"][a["kv_indices"]], a["v_buffer"][a["kv_indices"]], a["kv_indptr"]
    output, lse = kernel(a["q_extend"], k, v, queries, keys, a["sm_scale"], a["is_causal"])
    a["o_extend"].copy_(output)
    a["lse_extend"].copy_(lse.mT)


def lmdeploy(a: Any, kernel: Any) -> Any:
    assert a["causal"] and a["kv_layout"] == "shd" and a["max_seqlen_q"] == 33
    return kernel(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], a["softmax_scale"], a["causal"])[0]


def unified(a: Any, kernel: Any) -> None:
    """Keys and values of pages of 16, equally wide; the output scaled by the reciprocal."""
    k, v, lengths, start = a["k"], a["v"], a["seqused_k"].tolist(), a["cu_seqlens_q"]
    assert k.shape == v.shape and k.shape[1] == 16 and a["causal"] and a["window_size"] == (-1, -1)
    assert (a["max_seqlen_q"], a["max_seqlen_k"], a["softcap"]) == (max(lengths), max(lengths), 0)
    tables = list(zip(a["block_table"], lengths, strict=True))
    keys, values = (torch.cat([x[table].flatten(0, 1)[:n] for table, n in tables]) for x in (k, v))
    output, _ = kernel(a["q"], keys, values, start, start, a["softmax_scale"], True)
    scale = 1.0 if a["output_scale"] is None else a["output_scale"]
    a["out"].copy_((output.float() / scale).clamp(-448, 448))


def _longest(starts: torch.Tensor) -> int:
    return int(starts.diff().max())


def _adapter(name: str) -> Any:
    return loading.load_role(references.parse_reference(name), roles.Role.PREFILL)


_VARLEN = "flash_attn_varlen_func"
_TOKENSPEED = ("tokenspeed_mla", "tokenspeed_mla/mla_prefill.py:tokenspeed_mla_prefill", tokenspeed)
_CUDNN = ("flashinfer.cudnn", "flashinfer/cudnn/prefill.py:cudnn_batch_prefill_with_kv_cache", cudnn)
_TRTLLM = ("flashinfer.prefill", "flashinfer/prefill.py:trtllm_ragged_attention_deepseek", trtllm)
_EXTEND, _CUDA = "sglang.kernels.ops.attention.extend_attention", "lmdeploy.pytorch.kernels.cuda.flashattention"
STAND_INS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "FLASH_ATTN[fa2] flash-attn 2.8.3": ("flash_attn.flash_attn_interface", _VARLEN, fa2),
    "FLASH_ATTN[fa3] fa3-fwd 0.0.3": ("fa3_fwd_interface", _VARLEN, fa3_or_4),
    "FLASH_ATTN[fa4] flash-attn-4 4.0.0b36": ("flash_attn.cute", f"flash_attn/cute/interface.py:{_VARLEN}", fa3_or_4),
    "FLASH_ATTN[torch] ": ("", "_flash_attention_forward", torchs_own),
    "TORCH_SDPA[efficient] ": ("", "_efficient_attention_forward", efficient),
    "CUDNN[flashinfer] flashinfer-python 0.6.13": _CUDNN,
    "CUDNN[flashinfer] flashinfer-python 0.7.2.post1": _CUDNN,
    "TRTLLM_RAGGED flashinfer-python 0.6.13": _TRTLLM,
    "TRTLLM_RAGGED flashinfer-python 0.7.2.post1": _TRTLLM,
    "TOKENSPEED_MLA tokenspeed-mla 2.0.4": _TOKENSPEED,
    "SGLANG_TRITON sglang 0.5.23": (_EXTEND, "extend_attention_fwd", extend),
    "LMDEPLOY_TRITON lmdeploy 0.18.0": (_CUDA, _VARLEN, lmdeploy),
    "TRITON_ATTN vllm 0.33.0": ("vllm.v1.attention.ops.triton_unified_attention", "unified_attention", unified),
}
"""By adapter and recorded package: module, function with its file where that is not the module, what stands for it."""


@pytest.fixture
def library(provided: Any, installed: Any, kernel: Any, monkeypatch: Any) -> Callable[[str], Any]:
    def install(key: str) -> Any:
        adapter, _, label = key.partition(" ")
        module, function, call = STAND_INS[key]
        if module:
            made = provided(label, module, {function: lambda a: call(a, kernel)})
            installed("flashinfer", cudnn=made)
            return _adapter(adapter)
        arguments = [x.name for x in getattr(torch.ops.aten, function).default._schema.arguments]

        def operator(*args: Any, **kwargs: Any) -> Any:
            a = dict(zip(arguments, args, strict=False)) | kwargs
            assert set(a) <= set(arguments)
            return call(a, kernel)

        monkeypatch.setattr(torch.ops.aten, function, operator)
        return _adapter(adapter)

    return install


WITHOUT_LSE = ("LMDEPLOY_TRITON lmdeploy 0.18.0", "TRITON_ATTN vllm 0.33.0")
IN_CODES = [key for key in STAND_INS if key.startswith(("FLASH_ATTN[fa3]", "TRTLLM", "TOKENSPEED"))]

PLAIN = [key for key in STAND_INS if key not in WITHOUT_LSE]


@pytest.mark.parametrize(("key", "dtype"), [*((key, "bf16") for key in PLAIN), *((key, "e4m3") for key in IN_CODES)])
def test_conventions(key: str, dtype: str, library: Any, conforms: Any) -> None:
    library(key)
    conforms(key.split()[0], dtype)


@pytest.mark.parametrize(
    ("key", "asked"), [(WITHOUT_LSE[0], "dims=192-64-256-512"), (WITHOUT_LSE[1], ""), (WITHOUT_LSE[1], "quant=fp8")]
)
def test_conventions_without_an_lse(key: str, asked: str, library: Any, passes: Any, prepared: Any) -> None:
    """New tokens, into ``out`` or not, in e4m3 where that is asked for, and what needs an LSE."""
    library(key)
    new = ";".join(filter(None, ("new_tokens:heads=2;q=[3,0,33];pad=1", asked)))
    subject = passes(key.split()[0], roles.Role.PREFILL, f"{new};lse=0", f"{new};lse=0;out=1")
    for needs in (new, new.replace("new_tokens:", "context_chunk:").replace(";quant=fp8", "") + ";kv=[5,0,7]"):
        assert subject.unsupported(case.Case.parse(needs)) == ["LSE not declared"]
        backend, call = prepared(subject, needs)
        with pytest.raises(UnsupportedConfiguration, match="LSE"):
            call.invoke(backend, call.output_buffer())


HEAD_DIMS = {
    "CUDNN": {(128, 64, 128): True, (24, 8, 20): False, (256, 64, 320): False},
    "LMDEPLOY_TRITON": {(128, 64, 128): False, (192, 64, 256): True, (64, 0, 256): False, (8, 4, 16): False},
    "SGLANG_TRITON": {(128, 64, 32): False, (128, 64, 128): True},
    "TRITON_ATTN": {(128, 64, 128): True, (128, 64, 192): True, (128, 64, 256): False},
}


@pytest.mark.parametrize("name", HEAD_DIMS)
def test_says_which_head_dims_it_takes(name: str) -> None:
    for (nope, rope, value), takes in HEAD_DIMS[name].items():
        dims = dimensions.MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
        assert _adapter(name).supports_mla_dimensions(dims) == takes, dims


def test_operands_are_copied_only_if_a_row_starts_in_between_and_lengths_only_if_the_host_has_none() -> None:
    views: list[tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = [
        (lambda x: x, True),
        (lambda x: x[..., 8:24], True),  # starts and strides are multiples of 16 bytes
        (lambda x: x[..., 4:20], False),  # starts in between
        (lambda x: x[..., ::2], False),  # columns apart
        (lambda x: x.transpose(0, 1), True),
        (lambda x: x.flatten()[: 3 * 2 * 20].view(3, 2, 20)[..., :16], False),  # every other row starts in between
    ]
    for view, kept in views:
        x = view(torch.randn(3, 2, 32).bfloat16())
        copy = conversions.aligned(x)
        assert (copy is x) == kept and torch.equal(copy, x) and conversions.aligned(copy) is copy
    table, cpu = torch.zeros(3, 1, dtype=torch.int32), torch.device("cpu")
    metadata = prefill_metadata((3, 0, 5), block_table=table, dtype=torch.bfloat16, device=cpu)
    metadata.query_lens_cpu = None
    assert conversions.RaggedBatch.of(metadata).query_lens == (3, 0, 5)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *(("FLASH_ATTN", told) for told in ("9 fa3", "9 fa4 fa3", "9 torch fa3 fa4 fa2", "10 fa4", "8 torch fa2")),
        *(("FLASHINFER", told) for told in ("8 fa2", "9 fa3", "10 cutlass", "12 fa2")),
        *(("FLASH_ATTN", "9 fa3 fa3 fa4 fa2 torch"), ("FLASHINFER_MLA", "9 fa3"), ("FLASHINFER_MLA", "10 fa2")),
    ],
)
def test_choice_by_device_and_what_is_installed(name: str, told: str, monkeypatch: Any) -> None:
    (major, chosen, *missing), family = told.split(), loading.load_backend(references.parse_reference(name))
    for variant, kernel in family.variants.items():
        reasons = ["missing"] if variant in missing else []
        monkeypatch.setattr(kernel, "missing_dependencies", classmethod(lambda cls, reasons=reasons: reasons))
    assert family.resolve(DeviceCapability(int(major), 0)).variant == chosen


def test_upstreams_build_of_fa3_is_used_where_the_wheel_is_missing(installed: Any, monkeypatch: Any) -> None:
    module, fa3 = installed("flash_attn_interface"), _adapter("FLASH_ATTN[fa3]")
    wheel = replace(fa3.libraries[0], module="no_such_module")
    monkeypatch.setattr(fa3, "libraries", (wheel,))
    backend = fa3(2, 0.1, 512, 128, 64, 128, None)
    assert backend.library is module and fa3.missing_dependencies() == []
    assert list(backend.kernel_evidence().items())[1:] == [("module", "flash_attn_interface"), ("variant", "fa3")]
