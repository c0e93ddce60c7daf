"""FLASH_ATTN_MLA_SPARSE: FLASH_ATTN_MLA's kernel over pages of one token, which lists name; vLLM's first on Hopper.

Each query token is a request whose block table is its list. Written for vLLM 0.33.0, as ``FlashAttnMLASparseImpl`` of
``vllm/v1/attention/backends/mla/flashattn_mla_sparse.py`` drives its fork of FlashAttention, for prefills and decodes.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.flash_attn_mla import FlashAttnMLAvLLM
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import HOPPER, Devices
from mla_conformance.backends.selected import Selected, SelectedKeysBackend
from mla_conformance.backends.sparse_checks import listed, packed

_ROPE = 64


class FlashAttnMLASparseBackend(LibraryKernel, SelectedKeysBackend):
    """Lists of any length, over a cache or over gathered keys, without an LSE, as vLLM has it."""

    name: ClassVar[str] = "FLASH_ATTN_MLA_SPARSE"
    libraries: ClassVar[tuple[Library, ...]] = FlashAttnMLAvLLM.libraries
    devices: ClassVar[Devices] = HOPPER
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64), (512, 0)]
    supports_topk_length: ClassVar[bool] = True
    returns_lse: ClassVar[bool] = False
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("vllm", "torch"),
        deviations=(
            Deviation("wants a list of pages without gaps and its length", "what lists name, packed on the device"),
            Deviation(
                "pages of one token follow each other",
                "slots are renumbered where blocks lie whole entries apart, as in vLLM, and other caches are copied",
            ),
            Deviation("wants latent and rope part of queries and cache apart", "two views of each, not copied"),
            Deviation("without a rope part: reads one all the same", "zeros in queries, as in vLLM"),
            Deviation("faults on rows that do not start at multiples of 16 bytes", "such operands are copied"),
            Deviation("vLLM asks for no LSE", "declared unsupported"),
        ),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """As without lists."""
        return FlashAttnMLAvLLM.lacks()

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        """See :class:`SelectedKeysBackend`."""
        (source,), query = sources, aligned(q)
        rows, apart = _rows(source.cache)
        table, lengths = _table(source, apart)
        ql_nope, latent = query[..., : self.kv_lora_rank], rows[..., : self.kv_lora_rank]
        q_pe, rope = query[..., self.kv_lora_rank :], rows[..., self.kv_lora_rank :]
        if not self.qk_rope_head_dim:
            q_pe, rope = q.new_zeros(*q.shape[:2], _ROPE), latent[..., :_ROPE]
        output = self.library.flash_attn_varlen_func(
            q=q_pe,
            k=rope,
            v=latent,
            q_v=ql_nope,
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
            max_seqlen_k=table.shape[1],
            seqused_k=lengths,
            block_table=table,
            softmax_scale=self.scale,
            causal=True,
            fa_version=3,
        )
        return output, None


def _rows(cache: Tensor) -> tuple[Tensor, int]:
    """Rows [S, 1, 1, D] of a cache from its first to its last, and how many of them lie from block to block."""
    page, width = cache.shape[1:]
    packed = cache if cache.stride(0) % width == 0 and cache.stride()[1:] == (width, 1) else cache.contiguous()
    pages = aligned(packed)
    apart = pages.stride(0) // width
    return pages.as_strided((len(cache) * apart - apart + page, 1, 1, width), (width, width, width, 1)), apart


def _table(source: Selected, apart: int) -> tuple[Tensor, Tensor]:
    """[T, K] int32: rows that the lists name, -1 behind them; [T] int32: how many that are."""
    named, page = listed(source.indices, source.length), source.cache.shape[1]
    return packed(source.indices // page * apart + source.indices % page, named)
