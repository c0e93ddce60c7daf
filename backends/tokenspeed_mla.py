"""TOKENSPEED_MLA: the CuTe DSL kernels of tokenspeed-mla for Blackwell, compiled at the first call.

The LSE of its decode kernel has base 2, unlike that of its prefill kernel.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import RaggedBatch, aligned, natural_heads_first
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import BLACKWELL, Devices
from mla_conformance.backends.ragged import RaggedPrefillBackend

_COMMAND = extra("tokenspeed-mla")
_LIBRARY = Library("tokenspeed_mla", "tokenspeed-mla", _COMMAND)
_DISTRIBUTIONS = ("tokenspeed-mla", "nvidia-cutlass-dsl")
_TILE = 128
"""Rows, query heads times query tokens, that a block of the decode kernel computes."""


class _TokenspeedKernel(LibraryKernel):
    """What the kernels of the package have in common."""

    name: ClassVar[str] = "TOKENSPEED_MLA"
    devices: ClassVar[Devices] = BLACKWELL
    libraries: ClassVar[tuple[Library, ...]] = (
        _LIBRARY,
        Library("cutlass", "nvidia-cutlass-dsl", _COMMAND),
        Library("tokenspeed_triton", "tokenspeed-triton", _COMMAND),
        Library("tvm_ffi", "apache-tvm-ffi", _COMMAND),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """The package imports whatever it lacks; it is asked for the error that it swallowed."""
        swallowed = getattr(cls.libraries[0].load(), "_IMPORT_ERROR", None)
        return [f"package tokenspeed-mla is installed, but cannot run: {swallowed}"] if swallowed is not None else []


class TokenspeedMLAPrefillBackend(_TokenspeedKernel, RaggedPrefillBackend):
    """One call a batch; the LSE needs no conversion but its layout."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float8_e4m3fn]
    head_dims: ClassVar[tuple[tuple[int, int], ...]] = (
        (192, 128),
        (128, 128),
        (64, 64),
        (32, 32),
    )  # what the library asserts
    declaration: ClassVar[Declaration] = Declaration(
        distributions=_DISTRIBUTIONS,
        e4m3_rounding=Rounding(p=Precision.E4M3),
        deviations=(
            Deviation("strides of q, k and v are ignored", "all three are made contiguous"),
            Deviation("LSE [T, N]", "transposed"),
            Deviation("the output is bfloat16 whatever the inputs are", "float16 is not declared"),
            Deviation("the maximum may lag by 2^8, so P in e4m3 has no scale", "declared e4m3"),
            Deviation("imports even where its dependencies are missing", "its recorded import error is reported"),
        ),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        output, lse = _LIBRARY.load().tokenspeed_mla_prefill(
            query=q.contiguous(),
            key=k.contiguous(),
            value=v.contiguous(),
            seq_lens=batch.key_start_loc.diff(),
            cum_seq_lens=batch.key_start_loc,
            max_seq_len=batch.max_key_len,
            batch_size=len(batch.query_lens),
            softmax_scale=self.scale,
            is_causal=batch.causal,
            return_lse=True,
            cum_seq_lens_q=batch.query_start_loc,
            max_seq_len_q=batch.max_query_len,
            out=out if out is not None and out.is_contiguous() else None,
        )
        return output, lse.mT


class TokenspeedMLADecodeBackend(_TokenspeedKernel, PagedDecodeBackend):
    """Uniform batches in the model's dtype; one call a batch."""

    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [2, 4, 8, 16, 32, 64, 128]  # divisors of a tile of keys
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_query_len: ClassVar[int | None] = None
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=_DISTRIBUTIONS,
        deviations=(
            Deviation("LSE to base 2, [B, queries of a request, N]", "times ln 2, [N, T]"),
            Deviation("wants the latent and the rope part of the query in one tensor", "joins them"),
            Deviation("operands must start at multiples of 16 bytes", "such a cache is copied"),
            Deviation("wants a packed block table", "is made contiguous"),
            Deviation("wants a workspace for its split keys", "of the largest size that its own split makes"),
            Deviation("reads an e4m3 cache only under queries in e4m3", "declared unsupported"),
            Deviation("masks several query tokens of context-parallel ranks in e4m3 only", "declared unsupported"),
            Deviation("imports even where its dependencies are missing", "its recorded import error is reported"),
        ),
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`."""
        metadata, library = self._decode_metadata, _LIBRARY.load()
        query = torch.cat([ql_nope, q_pe], dim=-1).unflatten(0, (len(metadata.query_lens_cpu), -1))
        output, lse = library.tokenspeed_mla_decode(
            query=query,
            kv_cache=aligned(kv_cache),
            workspace_buffer=self._workspace(query.device),
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            block_tables=metadata.block_table.contiguous(),
            seq_lens=metadata.seq_lens,
            max_seq_len=max(1, metadata.max_seq_len),
            softmax_scale=self.scale,
            causal_mask=True,
            return_lse=True,
        )
        return output.flatten(0, 1), natural_heads_first(lse.flatten(0, 1))

    def _workspace(self, device: torch.device) -> Tensor:
        """Float32 partial outputs and LSEs; the kernel splits keys until its blocks fill half of the processors."""
        if not hasattr(self, "_buffer"):
            rows = _LIBRARY.load().get_num_sm(device) * _TILE
            self._buffer = torch.empty(rows * (self.kv_lora_rank + 1) * 4, dtype=torch.int8, device=device)
        return self._buffer
