"""The FlashAttention family: all of it masks bottom-right and returns a natural float32 LSE [N, T]."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import library_roles, packaged
from mla_conformance.backends.conversions import ALIGNMENT, RaggedBatch, aligned, pad_head_dim
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed, packed

_OF_FA2 = (
    ("needs one head dim of q, k and v", "pads the narrower ones with zeros, slices the output"),
    packaged.LSE_INFINITE,
    packaged.COPIES,
    packaged.NO_OUT,
)
_COMMAND = "pip install --no-build-isolation flash-attn"
_UPSTREAMS_FA3 = packaged.in_extra("fa3", "flash_attn_interface", "flash-attn-3")


class FlashAttnPrefillBackend(library_roles.RaggedPrefillBackend):
    """The family: on Hopper FA3, on Blackwell FA4, elsewhere FA2, and PyTorch's own where nothing is installed."""

    name = "FLASH_ATTN"
    devices = packaged.FROM_AMPERE
    by_device = {9: ("fa3", "fa4", "fa2", "torch"), 10: ("fa4", "fa2", "torch"), 0: ("fa2", "torch", "fa4")}
    takes_head_dims = staticmethod(lambda qk, v: max(qk, v) <= 256)  # padded
    blanks = ("lse",)
    asked: ClassVar[str] = ""  # how a package is asked for the LSE
    takes_unequal: ClassVar[Any] = staticmethod(lambda qk, v: False)  # which unequal head dims it takes as they are

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        unit, qk_width, v_width = ALIGNMENT // q.element_size(), q.shape[-1], v.shape[-1]
        equal = qk_width == v_width or self.takes_unequal(qk_width, v_width)
        if qk_width % unit or v_width % unit or not equal:
            width = -(-max(qk_width, v_width) // unit) * unit
            q, k, v = (pad_head_dim(x, width) for x in (q, k, v))
        output, lse, *_ = self.call(aligned(q), aligned(k), aligned(v), batch)
        return output[..., : self.v_head_dim], lse

    def call(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Any:
        options = {"softmax_scale": self.scale, "causal": batch.causal, self.asked: True}
        return self.library.flash_attn_varlen_func(q, k, v, **batch.cumulative, **options)


FlashAttnPrefillBackend.also(
    "fa2",
    libraries=(packaged.Library("flash_attn.flash_attn_interface", "flash-attn", _COMMAND),),
    asked="return_attn_probs",
    declaration=packaged.declared("flash-attn torch", *_OF_FA2),
)


class TorchFlashAttention(FlashAttnPrefillBackend, variant="torch"):
    of_torch = {"torch": torch.__version__, "operator": "aten::_flash_attention_forward"}
    declaration = packaged.declared("torch", *_OF_FA2)

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        built = torch.backends.cuda.is_built() and torch.backends.cuda.is_flash_attention_available()
        return [] if built else [f"torch {torch.__version__} is built without CUDA flash attention"]

    def call(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Any:
        options = (*batch.lengths, 0.0, batch.causal, False)
        return torch.ops.aten._flash_attention_forward(q, k, v, *options, scale=self.scale)


FlashAttnPrefillBackend.also(
    "fa3",
    libraries=(packaged.in_extra("fa3", "fa3_fwd_interface", "fa3-fwd", other=_UPSTREAMS_FA3),),
    devices=packaged.HOPPER._replace(needed="9.x"),
    asked="return_attn_probs",
    takes_unequal=staticmethod(lambda qk, v: 128 < qk <= 192 and 96 < v <= 128),  # that it has kernels for
    supported_dtypes=[torch.bfloat16, torch.float8_e4m3fn],
    declaration=packaged.declared(
        "fa3-fwd torch",
        (
            "q, k and v of unequal head dims only at 129-192 with 97-128 columns of v",
            "other head dims are padded with zeros, the output is sliced",
        ),
        ("LSE +inf where a whole call has no key; -inf in a single row", "such a call is not launched"),
        ("the wheel fa3-fwd is built without float16", "declared unsupported"),
        packaged.FP22_SUMS,
        packaged.COPIES,
        packaged.NO_OUT,
        e4m3_rounding=packaged.SCALED_P_FP22,
    ),
)
_OF_FA4 = {"flash_attn.cute": "flash-attn-4", "cutlass": "nvidia-cutlass-dsl", "quack": "quack-kernels"}
FlashAttnPrefillBackend.also(  # which compiles at the first call for each configuration
    "fa4",
    libraries=tuple(packaged.in_extra("fa4", *each) for each in _OF_FA4.items()),
    asked="return_lse",
    takes_unequal=staticmethod(lambda qk, v: (qk, v) == (192, 128)),
    declaration=packaged.declared(
        "flash-attn-4 nvidia-cutlass-dsl quack-kernels torch",
        ("its fourth positional argument is not the lengths", "lengths are passed by keyword"),
        ("on Blackwell only head dims up to 128, (192, 128) and (256, 256)", "others are padded"),
        packaged.NO_OUT,
    ),
)


_BUILD = "build FlashAttention's folder hopper with paged KV and the head dims (64, 512)"
_NEEDED = {"PAGEDKV": "paged KV", "HDIM64": "head dim 64", "HDIMDIFF64": "the head dims (64, 512)"}
_NEEDED |= {"SPLIT": "split keys", "VARLEN": "lengths"}
"""What a build may leave out, by its flag, and this kernel is made of."""
_DEVIATIONS = (packaged.PARTS_CACHE, packaged.COPIES)


class FlashAttnMLADecodeBackend(library_roles.PagedDecodeBackend):
    """The family: whichever package is installed, upstream's build first.

    FlashAttention-3 with a second pair of query and key: the rope part is query and key, the latent second query and
    value.
    """

    name = "FLASH_ATTN_MLA"
    devices = packaged.HOPPER
    by_device = {0: ("upstream", "sglang", "vllm")}
    supported_block_sizes = [packaged.MultipleOf(16)]  # what vLLM asks of it
    supported_query_len = None
    supports_nonuniform_queries = True
    cudagraph_support = packaged.UNIFORM_BATCH

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        x, pages = self._decode_metadata, aligned(kv_cache).unsqueeze(2)
        latent, rope = pages[..., : self.kv_lora_rank], pages[..., self.kv_lora_rank :]
        batch = {"cu_seqlens_q": x.query_start_loc, "max_seqlen_q": x.max_query_len, "causal": True}
        options = {"softmax_scale": self.scale, "return_softmax_lse": True}
        output, lse, *_ = self.call(aligned(q_pe), rope, latent, aligned(ql_nope), **batch, **options)
        return output, lse

    def call(self, q: Tensor, k: Tensor, v: Tensor, qv: Tensor, **options: Any) -> Any:
        lengths, table = self._decode_metadata.seq_lens, self._decode_metadata.block_table
        return self.library.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=lengths, page_table=table, **options)


class FlashAttnMLAUpstream(FlashAttnMLADecodeBackend, variant="upstream"):
    libraries = (packaged.Library("flash_attn_interface", "flash-attn-3", _BUILD),)
    declaration = packaged.declared("flash-attn-3 tokenspeed-fa3 torch", *_DEVIATIONS)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return super().supports_dtype(dtype) and not (dtype == torch.float16 and cls.left_out("FP16"))

    @classmethod
    def lacks(cls) -> str:
        lacks = ", ".join(what for flag, what in _NEEDED.items() if cls.left_out(flag))
        return f"flash_attn_interface is installed, but built without {lacks}; {_BUILD}" if lacks else ""

    @staticmethod
    def left_out(flag: str) -> bool:
        """Whether the installed build notes that it was made without a feature; its flags have two spellings."""
        if find_spec("flash_attn_config") is None:
            return False
        flags: dict[str, bool] = import_module("flash_attn_config").CONFIG["build_flags"]
        return any(flags.get(f"{prefix}_DISABLE_{flag}", False) for prefix in ("FLASHATTENTION", "FLASH_ATTENTION"))


FlashAttnMLADecodeBackend.also(
    "sglang",
    libraries=(packaged.Library("sgl_kernel.flash_attn", "sglang-kernel", "pip install sglang-kernel"),),
    declaration=packaged.declared("sglang-kernel torch", *_DEVIATIONS),
)


class FlashAttnMLAvLLM(FlashAttnMLADecodeBackend, variant="vllm"):
    libraries = (packaged.Library("vllm.vllm_flash_attn.flash_attn_interface", "vllm", "pip install vllm"),)
    declaration = packaged.declared("vllm torch", *_DEVIATIONS)

    @classmethod
    def lacks(cls) -> str:
        reason = cls.libraries[0].load().fa_version_unsupported_reason(3)
        return f"package vllm is installed, but has no FlashAttention 3: {reason}" if reason else ""

    def call(self, q: Tensor, k: Tensor, v: Tensor, qv: Tensor, **options: Any) -> Any:
        x, version = self._decode_metadata, {"fa_version": 3}
        keys = {"seqused_k": x.seq_lens, "block_table": x.block_table, "max_seqlen_k": x.max_seq_len}
        return self.library.flash_attn_varlen_func(q, k, v, q_v=qv, **keys, **options, **version)


_ROPE = 64
_APART = "slots are renumbered where blocks lie whole entries apart, as in vLLM, and other caches are copied"


class FlashAttnMLASparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    """The same over pages of one token, which lists name, as ``FlashAttnMLASparseImpl`` of vLLM 0.33.0 drives it."""

    name = "FLASH_ATTN_MLA_SPARSE"
    libraries = FlashAttnMLAvLLM.libraries
    devices = packaged.HOPPER
    supported_latent_dims = [(512, 64), (512, 0)]
    supports_topk_length = True
    returns_lse = False
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "vllm torch",
        ("wants a list of pages without gaps and its length", "what lists name, packed on the device"),
        ("pages of one token follow each other", _APART),
        packaged.PARTS_BOTH,
        ("without a rope part: reads one all the same", "zeros in queries, as in vLLM"),
        packaged.COPIES,
        ("vLLM asks for no LSE", "declared unsupported"),
    )
    lacks = FlashAttnMLAvLLM.lacks

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        (source,), (latent, rope) = sources, aligned(q).tensor_split([self.kv_lora_rank], dim=-1)
        blocks, page, width = source.cache.shape
        # Rows of a cache from its first to its last, and how many of them lie from block to block.
        whole = source.cache.stride(0) % width == 0 and source.cache.stride()[1:] == (width, 1)
        pages = aligned(source.cache if whole else source.cache.contiguous())
        apart = pages.stride(0) // width
        rows = pages.as_strided((blocks * apart - apart + page, 1, 1, width), (width, width, width, 1))
        slots = source.indices // page * apart + source.indices % page
        table, lengths = packed(slots, listed(source.indices, source.length))
        v, k = rows.tensor_split([self.kv_lora_rank], dim=-1)
        if not self.qk_rope_head_dim:
            rope, k = q.new_zeros(*q.shape[:2], _ROPE), v[..., :_ROPE]
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        queries = {"q": rope, "q_v": latent, "cu_seqlens_q": starts, "max_seqlen_q": 1}
        keys = {"k": k, "v": v, "block_table": table, "seqused_k": lengths, "max_seqlen_k": table.shape[1]}
        options = {"softmax_scale": self.scale, "causal": True, "fa_version": 3}
        return self.library.flash_attn_varlen_func(**queries, **keys, **options), None
