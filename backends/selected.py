"""What sparse backends of ours have in common: both calls as lists over one or two caches, checked first.

A backend implements :meth:`SelectedKeysBackend.attend`; whatever its library needs converted, it converts there.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.operands import require_asked
from mla_conformance.backends.sparse import MLASparseBackend, MLASparseSelectorConfig
from mla_conformance.backends.sparse_checks import (
    check_cache,
    check_lists,
    check_operands,
    check_selection,
    names_twice,
)


@dataclass(frozen=True)
class Selected:
    """Lists over one cache, or over gathered keys, which are a cache of pages of one token."""

    cache: Tensor  # [blocks, page, width], or gathered keys [S, 1, D]
    paged: bool  # whether it is a cache
    layout: str  # what its entries are; ``auto`` of gathered keys
    indices: Tensor  # [T, K] int32
    length: Tensor | None  # [T] int32, or None
    space: IndexSpace  # what the lists count

    def rows(self, rows: slice) -> "Selected":
        """The lists of some rows."""
        length = None if self.length is None else self.length[rows]
        return replace(self, indices=self.indices[rows], length=length)


class SelectedKeysBackend(MLASparseBackend):
    """Operands are checked; the lists of a second cache stand behind those of the first."""

    def run_sparse_decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        k_scale: Tensor,
        topk_indices: Tensor,
        return_softmax_lse: bool,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_topk_indices: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :class:`MLASparseBackend`."""
        space = self._sparse_metadata.index_space
        sources = [Selected(kv_cache, True, self.kv_cache_dtype, topk_indices, topk_length, space)]
        if extra_kv_cache is not None:
            if self.extra_kv_cache_dtype is None or extra_topk_indices is None:
                raise ValueError(
                    "extra_kv_cache: expected extra_topk_indices with it and its dtype at construction, got "
                    f"extra_kv_cache_dtype={self.extra_kv_cache_dtype!r}"
                )
            extra = extra_topk_indices, extra_topk_length, IndexSpace.SLOT
            sources.append(Selected(extra_kv_cache, True, self.extra_kv_cache_dtype, *extra))
        return self._run(q, sources, k_scale, attn_sink, return_softmax_lse)

    def run_sparse_prefill(
        self,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        return_softmax_lse: bool,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :class:`MLASparseBackend`."""
        gathered = Selected(kv, False, "auto", topk_indices, topk_length, self._sparse_metadata.index_space)
        return self._run(q, [gathered], q.new_ones((), dtype=torch.float32), attn_sink, return_softmax_lse)

    @abstractmethod
    def attend(
        self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Call the library.

        Args:
            q: [T, N, D]; any strides.
            sources: the lists, and behind them those of a second cache if there is one.
            k_scale: float32 scalar tensor.
            sink: [N] float32, or None.

        Returns:
            (output [T, N, L] of the query's dtype, lse [N, T] float32, natural logarithm, -inf without keys); no LSE
            if the library has none.
        """

    def _run(
        self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None, return_softmax_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._check(q, sources, sink, return_softmax_lse)
        output, lse = self.attend(q, sources, k_scale, sink)
        if not return_softmax_lse:
            return output
        assert lse is not None, "a backend without an LSE is refused before"
        return output, lse

    def _check(self, q: Tensor, sources: list[Selected], sink: Tensor | None, lse: bool) -> None:
        """Refuse what is not declared and what does not fit."""
        names = (("kv_cache", "topk_indices"), ("extra_kv_cache", "extra_topk_indices"))
        named = list(zip(sources, names if sources[0].paged else (("kv", "topk_indices"),), strict=False))
        for source, (_, lists) in named:
            check_lists(lists, source.indices, source.length, q.shape[0])
        reads = _may_wait(q.device)
        twice = reads and not self.supports_duplicates and any(names_twice(x.indices, x.length) for x in sources)
        self._require_declared(q, sources, sink, lse=lse, duplicates=twice)
        check_operands(self, self._sparse_metadata, q, sink)
        for source, (cache, lists) in named:
            check_cache(cache, source.cache, source.layout, self, q.dtype)
            if reads:
                check_selection(lists, source.indices, source.length, self._limit(source))

    def _require_declared(self, q: Tensor, sources: list[Selected], sink: Tensor | None, **asked: bool) -> None:
        main, extra = sources[0], sources[1] if len(sources) > 1 else None
        require_asked(
            self,
            q.device,
            MLASparseSelectorConfig,
            call="decode" if main.paged else "prefill",
            dtype=q.dtype,
            kv_cache_dtype=main.layout,
            block_size=main.cache.shape[1],
            topk=main.indices.shape[1],
            index_space=main.space,
            topk_length=main.length is not None,
            sink=sink is not None,
            dcp_world_size=self._sparse_metadata.dcp_world_size,
            # An instance cannot see what they are; its caller asked what the class reads.
            tile_scales=self.supported_tile_scales[0],
            extra_kv_cache_dtype=extra.layout if extra else None,
            extra_block_size=extra.cache.shape[1] if extra else 0,
            extra_topk=extra.indices.shape[1] if extra else 0,
            **asked,
        )

    def _limit(self, source: Selected) -> Tensor:
        """What the numbers of each row's list are below: [1, 1] or [T, 1], on the device."""
        metadata = self._sparse_metadata
        if source.space is IndexSpace.SLOT:
            slots = source.cache.shape[0] * source.cache.shape[1]
            return torch.full((1, 1), slots, device=source.indices.device)
        ranks = metadata.dcp_world_size if source.space is IndexSpace.POSITION else 1
        # A rank is not told how many tokens others hold: at most so many more each.
        bound = metadata.seq_lens * ranks + (ranks - 1) * metadata.cp_kv_cache_interleave_size
        return bound[metadata.req_id_per_token.long()].unsqueeze(1)


def _may_wait(device: torch.device) -> bool:
    """Whether the host may read what a call is handed: not on a stream of a caller's own, or in a graph's capture.

    There reading would wait for inputs that are still to come, and hide a library that does not wait for them.
    """
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
