"""TOKENSPEED_MLA: the CuTe DSL kernels of tokenspeed-mla for Blackwell, compiled at the first call."""

import torch
from torch import Tensor

from mla_conformance.backends import library_roles, packaged
from mla_conformance.backends.conversions import RaggedBatch, aligned, natural_heads_first, writable

_DISTRIBUTIONS = "tokenspeed-mla nvidia-cutlass-dsl"
_SWALLOWS = ("imports even where its dependencies are missing", "its recorded import error is reported")
_TILE = 128  # rows, query heads times query tokens, that a block of the decode kernel computes
_MODULES = {"tokenspeed_mla": "tokenspeed-mla", "cutlass": "nvidia-cutlass-dsl"}
_MODULES |= {"tokenspeed_triton": "tokenspeed-triton", "tvm_ffi": "apache-tvm-ffi"}


class _TokenspeedKernel(packaged.LibraryKernel):
    name = "TOKENSPEED_MLA"
    devices = packaged.BLACKWELL
    libraries = tuple(packaged.in_extra("tokenspeed-mla", *each) for each in _MODULES.items())

    @classmethod
    def lacks(cls) -> str:
        swallowed = getattr(cls.libraries[0].load(), "_IMPORT_ERROR", None)
        return "" if swallowed is None else f"package tokenspeed-mla is installed, but cannot run: {swallowed}"


class TokenspeedMLAPrefillBackend(_TokenspeedKernel, library_roles.RaggedPrefillBackend):
    supported_dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    head_dims = ((192, 128), (128, 128), (64, 64), (32, 32))  # what the library asserts
    declaration = packaged.declared(
        _DISTRIBUTIONS,
        ("strides of q, k and v are ignored", "all three are made contiguous"),
        packaged.LSE_TOKENS_FIRST,
        ("the output is bfloat16 whatever the inputs are", "float16 is not declared"),
        ("the maximum may lag by 2^8, so P in e4m3 has no scale", "declared e4m3"),
        _SWALLOWS,
        e4m3_rounding=packaged.Rounding(p=packaged.Precision.E4M3),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        query_starts, key_starts, longest_query, longest_key = batch.lengths
        operands = {"query": q.contiguous(), "key": k.contiguous(), "value": v.contiguous(), "out": writable(out)}
        keys = {"seq_lens": key_starts.diff(), "cum_seq_lens": key_starts, "max_seq_len": longest_key}
        queries = {"cum_seq_lens_q": query_starts, "max_seq_len_q": longest_query, "batch_size": len(batch.query_lens)}
        options = {"softmax_scale": self.scale, "is_causal": batch.causal, "return_lse": True}
        output, lse = self.library.tokenspeed_mla_prefill(**operands, **keys, **queries, **options)
        return output, lse.mT


class TokenspeedMLADecodeBackend(_TokenspeedKernel, library_roles.PagedDecodeBackend):
    supported_block_sizes = [2, 4, 8, 16, 32, 64, 128]  # divisors of a tile of keys
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
        x, library = self._decode_metadata, self.library
        query = torch.cat([ql_nope, q_pe], dim=-1).unflatten(0, (len(x.query_lens_cpu), -1))
        if not hasattr(self, "_buffer"):
            # Float32 partial outputs and LSEs; it splits keys until its blocks fill half of the processors.
            rows = library.get_num_sm(query.device) * _TILE
            self._buffer = torch.empty(rows * (self.kv_lora_rank + 1) * 4, dtype=torch.int8, device=query.device)
        operands = {"query": query, "kv_cache": aligned(kv_cache), "workspace_buffer": self._buffer}
        batch = {"block_tables": x.block_table.contiguous(), "seq_lens": x.seq_lens}
        options = {"softmax_scale": self.scale, "causal_mask": True, "return_lse": True, **self.latent_dims}
        output, lse = library.tokenspeed_mla_decode(**operands, **batch, max_seq_len=max(1, x.max_seq_len), **options)
        return output.flatten(0, 1), natural_heads_first(lse.flatten(0, 1))
