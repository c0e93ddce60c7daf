"""AITER's Triton kernels of MLA behind classes of one's own, for ROCm/aiter at e4048607; nothing is registered.

mla-conformance certify --backend docs/examples/aiter_kernels.py:AiterDecode --device cuda
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.aiter_triton import PAGES, AiterLibrary, aiter_library
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.checks import check_decode_operands
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeBackend
from mla_conformance.backends.selected import Selected, SelectedKeysBackend


class AiterDecode(MLADecodeBackend):
    """``mla_decode_fwd``, which reads whole pages: it is handed copies that are 0 behind each request's last key."""

    library: ClassVar[AiterLibrary] = aiter_library("mla")
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = PAGES
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_query_len: ClassVar[int | None] = None
    returns_lse: ClassVar[bool] = False
    declaration: ClassVar[Declaration] = Declaration(
        deviations=(
            Deviation("multiplies what stands behind a request's last key by 0", "copies pages, with zeros there"),
            Deviation("divides by a length of 0", "0 in the rows of such requests"),
        )
    )

    @staticmethod
    def get_name() -> str:
        """See the base class."""
        return "AITER_DECODE"

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """See the base class."""
        return cls.library.missing()

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Tensor:
        """See the base class."""
        metadata = self._decode_metadata
        check_decode_operands(self, metadata, ql_nope, q_pe, kv_cache)
        rows, output = int(metadata.query_lens_cpu.sum()), ql_nope.new_zeros(ql_nope.shape)
        if rows:
            cache, block_table = own_pages(metadata, kv_cache)
            self._attend(torch.cat((ql_nope, q_pe), dim=-1)[:rows], cache, block_table, output[:rows])
            keyless = (metadata.seq_lens == 0).repeat_interleave(metadata.query_start_loc.diff(), output_size=rows)
            output[:rows][keyless] = 0.0
        return output

    def _attend(self, q: Tensor, cache: Tensor, block_table: Tensor, output: Tensor) -> None:
        metadata = self._decode_metadata
        self.library.load().mla_decode_fwd(
            q=q,
            kv_buffer=cache.unsqueeze(2),
            out=output,
            cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.seq_lens,
            max_seqlen_kv=metadata.max_seq_len,
            block_tables=block_table,
            softmax_scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            causal=True,
            q_descale=None,
            kv_descale=None,
        )


def own_pages(metadata: MLACommonDecodeMetadata, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """A cache [B · pages, page, D] that holds the batch alone, zeros behind its keys, and its table [B, pages]."""
    requests, page = len(metadata.seq_lens), kv_cache.shape[1]
    pages = max(1, -(-metadata.max_seq_len // page))
    tokens = torch.arange(pages * page, device=kv_cache.device).view(pages, page)
    behind = tokens >= metadata.seq_lens[:, None, None]
    blocks = metadata.block_table[:, :pages].long().masked_fill(behind[..., 0], 0)
    cache = kv_cache[blocks].masked_fill(behind[..., None], 0.0)
    table = torch.arange(requests * pages, dtype=torch.int32, device=kv_cache.device).view(requests, pages)
    return cache.flatten(0, 1), table


class AiterSparse(SelectedKeysBackend):
    """``unified_attention_sparse_mla``: tiles of as many columns of a list as a page has tokens."""

    library: ClassVar[AiterLibrary] = aiter_library("unified_attention_sparse_mla")
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = PAGES
    supported_calls: ClassVar[list[str]] = ["decode"]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_heads: ClassVar[list[int]] = [16, 32, 64, 128]
    returns_lse: ClassVar[bool] = False
    declaration: ClassVar[Declaration] = Declaration(
        deviations=(Deviation("a list that names no key makes its row NaN, as its source says", "0 in such rows"),)
    )

    @staticmethod
    def get_name() -> str:
        """See the base class."""
        return "AITER_SPARSE"

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """See the base class."""
        return cls.library.missing()

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        """See the base class."""
        metadata = self._sparse_metadata
        indices, output = sources[0].indices.contiguous(), q.new_empty(*q.shape[:2], self.kv_lora_rank)
        self.library.load().unified_attention_sparse_mla(
            q=q.contiguous(),
            kv=sources[0].cache.unsqueeze(2),
            out=output,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            topk_indices=indices,
            block_table=metadata.block_table,
            kv_lora_rank=self.kv_lora_rank,
        )
        output[(indices < 0).all(dim=1)] = 0.0
        return output, None
