"""What the decode adapters of GPU libraries have in common: absorbed queries of a batch against one paged cache.

Nothing here decides by the lengths what to launch, so that a captured CUDA graph serves other lengths.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.decode import LatentDecode, MLADecodeBackend
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.tree import MLATreeBackend


class PagedLatentDecode(LibraryKernel, LatentDecode):
    """Operands are trimmed to the rows that count; a row without keys is set to 0 and -inf."""

    supported_latent_dims = [(512, 64)]  # unless an adapter says otherwise

    def _run(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        metadata = self._decode_metadata
        self._check(self, metadata, ql_nope, q_pe, kv_cache)
        rows, lse = int(metadata.query_lens_cpu.sum()), None
        if rows:
            found = self.attend(ql_nope[:rows], q_pe[:rows], kv_cache, k_scale)
            output, lse = found if self.returns_lse else (found, None)
            # On the device, from what stands there when it runs.
            keyless = (metadata.seq_lens == 0).repeat_interleave(metadata.query_start_loc.diff(), output_size=rows)
            output.masked_fill_(keyless[:, None, None], 0.0)
            lse = None if lse is None else lse.masked_fill(keyless, -torch.inf)
        if rows < len(ql_nope) or not rows:
            whole = ql_nope.new_zeros(ql_nope.shape)
            whole_lse = ql_nope.new_full((self.num_heads, len(whole)), -torch.inf, dtype=torch.float32)
            if rows:
                whole[:rows] = output
            if lse is not None:
                whole_lse[:, :rows] = lse
            output, lse = whole, whole_lse
        return (output, lse) if self.returns_lse else output

    @abstractmethod
    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Any:
        """Call the library with the rows of ql_nope [T, N, L] and q_pe [T, N, R] that count, at least one.

        Returns (output [T, N, L], which the caller may write to, lse [N, T] float32, natural), or of a library without
        LSE the output alone; anything in rows without keys.
        """

    @property
    def latent_dims(self) -> dict[str, int]:
        return {"kv_lora_rank": self.kv_lora_rank, "qk_rope_head_dim": self.qk_rope_head_dim}


class PagedDecodeBackend(PagedLatentDecode, MLADecodeBackend):
    run_decode = PagedLatentDecode._run


class PagedTreeBackend(PagedLatentDecode, MLATreeBackend):
    run_tree_decode = PagedLatentDecode._run
