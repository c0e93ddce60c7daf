"""What a backend of ours checks before it launches: the refusals of SPEC 3.8, with expected and got."""

import torch
from torch import Tensor

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend, MLADecodeSelectorConfig
from mla_conformance.backends.interface import PrefillKernelBackend, UnsupportedConfiguration
from mla_conformance.backends.kernel import AttentionKernel
from mla_conformance.backends.operands import require_asked, require_forms
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS, cache_dtype, entry_width
from mla_conformance.reference.entry_formats import TILED_FORMATS


def check_operands(
    backend: PrefillKernelBackend, q: Tensor, k: Tensor, v: Tensor, query_tokens: int, key_tokens: int
) -> None:
    """Refuse operands that the backend does not declare, or with fewer rows than the metadata counts.

    Raises:
        UnsupportedConfiguration: a dtype or head dims outside the declaration.
        ValueError: shapes or lengths that do not fit the metadata.
    """
    for dtype in {operand.dtype for operand in (q, k, v)}:
        if not backend.supports_dtype(dtype):
            supported = ", ".join(map(str, backend.supported_dtypes))
            raise UnsupportedConfiguration(
                f"{backend.get_name()}: dtype {dtype} not supported (supported: {supported})"
            )
    if not backend.supports_mla_dimensions(backend.dimensions):
        raise UnsupportedConfiguration(f"{backend.get_name()}: MLA dimensions {backend.dimensions} not supported")
    widths = {"P + R": backend.dimensions.qk_head_dim, "V": backend.v_head_dim}
    known = {"T": query_tokens, "S": key_tokens, "N": backend.num_heads, **widths}
    require_forms(PrefillKernelBackend.run_prefill_new_tokens, (q, k, v), known)


def check_unquantised(backend: PrefillKernelBackend, output_scale: Tensor | None) -> None:
    """Refuse a quantised output in a backend that has none.

    Raises:
        UnsupportedConfiguration: an output scale was given.
    """
    if output_scale is not None and not backend.supports_quant_output(fp8_static_tensor_sym()):
        raise UnsupportedConfiguration(
            f"{backend.get_name()}: quantised output not supported; quantise the result of a call without output_scale"
        )


def check_decode_operands(
    backend: MLADecodeBackend, metadata: MLACommonDecodeMetadata, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor
) -> None:
    """Refuse operands that a decode backend does not declare or that contradict the metadata; reads no device memory.

    Raises:
        UnsupportedConfiguration: something outside of the declaration.
        ValueError: shapes or lengths that do not fit the metadata.
    """
    query_lens, page = metadata.query_lens_cpu.tolist(), kv_cache.shape[1]
    require_asked(
        backend,
        ql_nope.device,
        MLADecodeSelectorConfig,
        dtype=ql_nope.dtype,
        block_size=page,
        max_query_len=max(query_lens),
        uniform=len(set(query_lens) - {0}) <= 1,  # requests without a query pad a graph's batch
        dcp_world_size=metadata.dcp_world_size,
        lse=metadata.dcp_world_size > 1,
    )
    known = {"T": sum(query_lens), "N": backend.num_heads, "L": backend.kv_lora_rank, "R": backend.qk_rope_head_dim}
    require_forms(MLADecodeBackend.run_decode, (ql_nope, q_pe), known)
    check_cache("kv_cache", kv_cache, backend.kv_cache_dtype, backend, ql_nope.dtype)
    longest, pages = max(metadata.seq_lens_cpu.tolist()), metadata.block_table.shape[1]
    if pages * page < longest:
        raise ValueError(
            f"block_table: a sequence of {longest} tokens has {-(-longest // page)} pages of {page}, its row holds "
            f"{pages}"
        )


def check_cache(name: str, cache: Tensor, layout: str, backend: AttentionKernel, dtype: torch.dtype) -> None:
    """Refuse a cache of another form than the layout's; reads no device memory."""
    dims = (backend.kv_lora_rank, backend.qk_rope_head_dim)
    width, stored = entry_width(layout, *dims), cache_dtype(layout, dtype)
    if cache.dim() == 3 and cache.shape[2] == width and cache.dtype == stored:
        return
    fitting = [name for name in CACHE_LAYOUTS if name not in TILED_FORMATS or dims in TILED_FORMATS[name].dims]
    others = [name for name in fitting if cache.dim() and entry_width(name, *dims) == cache.shape[-1]]
    hint = f"which is as wide as {' or '.join(others)}" if others else "which is as wide as no layout of such keys"
    raise ValueError(
        f"{name}: expected [blocks, page, {width}] of {stored} for {layout}, got {list(cache.shape)} of {cache.dtype}, "
        f"{hint}"
    )
