"""ROCm/aiter's Triton kernels at e4048607, ``aiter/ops/triton/attention``: AITER_TRITON_MLA and AITER_TRITON_SPARSE."""

from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import library_roles, packaged
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

PAGES: list[int | packaged.MultipleOf] = [16, 32, 64]  # page sizes, which are the kernels' tiles of keys
_COMMIT = "e4048607a535ace3a2b51ded31b1c8c2d45c0879"
_COMMAND = f"AITER_TRITON_ONLY=1 pip install --no-build-isolation --no-deps git+https://github.com/ROCm/aiter@{_COMMIT}"


class AiterLibrary(packaged.Library):
    """A module of AITER's Triton kernels, without its operators in C++, and launchers without AMD's option."""

    def load(self) -> ModuleType:
        with packaged.environment({"AITER_TRITON_ONLY": "1"}):
            module = super().load()
        for name in ("triton_mla_prefill_fwd_kernel", "triton_mla_decode_fwd_reduce_kernel"):
            kernel = vars(module).get(name)
            if kernel is not None and torch.version.hip is None and not isinstance(kernel, _WithoutWaves):
                setattr(module, name, _WithoutWaves(kernel))
        return module


class _WithoutWaves:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda waves_per_eu, **arguments: self._kernel[grid](**arguments)


class InterpretedAiter(packaged.InterpretedLibrary, AiterLibrary):
    """The same with interpreted kernels, on a machine without a GPU, whose kind and size AITER asks for."""

    def interpreted(self) -> ModuleType:
        from triton.runtime import driver

        driver.set_active(SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch="")))
        module = super().interpreted()
        driver.set_active(None)
        vars(module).update(get_num_sms=lambda: 1)
        return module


def aiter_library(module: str) -> AiterLibrary:
    """A module of ``aiter.ops.triton.attention``."""
    return AiterLibrary(f"aiter.ops.triton.attention.{module}", "amd-aiter", _COMMAND)


class AiterTritonDecodeBackend(library_roles.PagedDecodeBackend):
    name = "AITER_TRITON_MLA"
    libraries = (aiter_library("mla"),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    function: ClassVar[str] = "mla_decode_fwd"
    supported_block_sizes = PAGES
    supported_kv_cache_dtypes = ["auto", "fp8"]
    supported_query_len = None
    returns_lse = False
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "amd-aiter triton",
        packaged.JOINS_Q,
        packaged.RETURNS_NO_LSE,
        ("hands waves_per_eu to kernels that Triton knows it for on AMD's GPUs alone", "drops it"),
        ("divides by a length of 0", "0 in the rows that the lengths say see no key"),
        packaged.PAGE_AT_ONCE,
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Tensor:
        x, output = self._decode_metadata, ql_nope.new_empty(ql_nope.shape)
        operands = {"q": torch.cat([ql_nope, q_pe], dim=-1), "kv_buffer": kv_cache.unsqueeze(2), "out": output}
        keys = {"seqused_k": x.seq_lens, "max_seqlen_kv": x.max_seq_len, "block_tables": x.block_table}
        scales = {"q_descale": None, "kv_descale": k_scale if self.kv_cache_dtype == "fp8" else None}
        options = {"cu_seqlens_q": x.query_start_loc, "softmax_scale": self.scale, "causal": True, **self.latent_dims}
        getattr(self.library, self.function)(**operands, **keys, **scales, **options)
        return output


_PREFILL = AiterTritonDecodeBackend.also(
    "prefill",
    packaged.UNSCALED_P,
    function="mla_prefill_fwd",
    supported_kv_cache_dtypes=["auto"],
    supports_nonuniform_queries=True,
)
packaged.interpreted(AiterTritonDecodeBackend, InterpretedAiter)
packaged.interpreted(_PREFILL, InterpretedAiter, "prefill-interpreted")


class AiterTritonSparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "AITER_TRITON_SPARSE"
    libraries = (aiter_library("unified_attention_sparse_mla"),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    supported_block_sizes = PAGES
    supported_calls = ["decode"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64), (256, 64)]
    supported_heads = [16 * tiles for tiles in range(1, 9)]
    returns_lse = False
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "amd-aiter triton",
        packaged.COMPUTES_NO_LSE,
        ("computes whole tiles of 16 heads", "other numbers are declared unsupported"),
        ("wants columns of queries and lists without gaps", "copies others"),
        ("a list that names no key makes its row NaN, as its source says", "0 in such rows"),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        (listed,), x = sources, self._sparse_metadata
        indices, output = listed.indices.contiguous(), q.new_empty(*q.shape[:2], self.kv_lora_rank)
        operands = {"q": q.contiguous(), "kv": listed.cache.unsqueeze(2), "out": output, "topk_indices": indices}
        queries = {"cu_seqlens_q": x.query_start_loc, "max_seqlen_q": x.max_query_len}
        keys = {"seqused_k": x.seq_lens, "max_seqlen_k": x.max_seq_len, "block_table": x.block_table}
        sizes = {"softmax_scale": self.scale, "kv_lora_rank": self.kv_lora_rank}
        self.library.unified_attention_sparse_mla(**operands, **queries, **keys, **sizes)
        return output.masked_fill_((indices < 0).all(dim=1)[:, None, None], 0.0), None


packaged.interpreted(AiterTritonSparseBackend, InterpretedAiter)
