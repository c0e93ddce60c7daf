"""TOKENSPEED_MLA: the CuTe DSL kernels of tokenspeed-mla for Blackwell, compiled at the first call.

The LSE of its decode kernel has base 2, unlike that of its prefill kernel.
"""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch, aligned, natural_heads_first
from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import BLACKWELL
from mla_conformance.backends.ragged import RaggedPrefillBackend

_DISTRIBUTIONS = "tokenspeed-mla nvidia-cutlass-dsl"
_SWALLOWS = ("imports even where its dependencies are missing", "its recorded import error is reported")
_TILE = 128
"""Rows, query heads times query tokens, that a block of the decode kernel computes."""


class _TokenspeedKernel(packaged.LibraryKernel):
    """What the kernels of the package have in common."""

    name = "TOKENSPEED_MLA"
    devices = BLACKWELL
    libraries = (
        Library("tokenspeed_mla", "tokenspeed-mla", extra("tokenspeed-mla")),
        Library("cutlass", "nvidia-cutlass-dsl", extra("tokenspeed-mla")),
        Library("tokenspeed_triton", "tokenspeed-triton", extra("tokenspeed-mla")),
        Library("tvm_ffi", "apache-tvm-ffi", extra("tokenspeed-mla")),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """The package imports whatever it lacks; it is asked for the error that it swallowed."""
        swallowed = getattr(cls.libraries[0].load(), "_IMPORT_ERROR", None)
        return [f"package tokenspeed-mla is installed, but cannot run: {swallowed}"] if swallowed is not None else []


class TokenspeedMLAPrefillBackend(_TokenspeedKernel, RaggedPrefillBackend):
    """One call a batch; the LSE needs no conversion but its layout."""

    supported_dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    head_dims = ((192, 128), (128, 128), (64, 64), (32, 32))  # what the library asserts
    declaration = packaged.declared(
        _DISTRIBUTIONS,
        ("strides of q, k and v are ignored", "all three are made contiguous"),
        packaged.LSE_TOKENS_FIRST,
        ("the output is bfloat16 whatever the inputs are", "float16 is not declared"),
        ("the maximum may lag by 2^8, so P in e4m3 has no scale", "declared e4m3"),
        _SWALLOWS,
        e4m3_rounding=Rounding(p=Precision.E4M3),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        output, lse = self.library.tokenspeed_mla_prefill(
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

    supported_block_sizes = [2, 4, 8, 16, 32, 64, 128]  # divisors of a tile of keys
    supported_latent_dims = [(512, 64)]
    supported_query_len = None
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        _DISTRIBUTIONS,
        ("LSE to base 2, [B, queries of a request, N]", "times ln 2, [N, T]"),
        packaged.JOINS_Q,
        ("operands must start at multiples of 16 bytes", "such a cache is copied"),
        packaged.PACKS_TABLE,
        ("wants a workspace for its split keys", "of the largest size that its own split makes"),
        ("reads an e4m3 cache only under queries in e4m3", "declared unsupported"),
        ("masks several query tokens of context-parallel ranks in e4m3 only", "declared unsupported"),
        _SWALLOWS,
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, library = self._decode_metadata, self.library
        query = torch.cat([ql_nope, q_pe], dim=-1).unflatten(0, (len(metadata.query_lens_cpu), -1))
        if not hasattr(self, "_buffer"):
            # Float32 partial outputs and LSEs; it splits keys until its blocks fill half of the processors.
            rows = library.get_num_sm(query.device) * _TILE
            self._buffer = torch.empty(rows * (self.kv_lora_rank + 1) * 4, dtype=torch.int8, device=query.device)
        output, lse = library.tokenspeed_mla_decode(
            query=query,
            kv_cache=aligned(kv_cache),
            workspace_buffer=self._buffer,
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
