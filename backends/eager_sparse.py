"""EAGER, sparse: an honest online softmax over the listed entries of a cache, all rows side by side, tile by tile.

To the steps of the softmax a row is what a head is to them elsewhere, and its heads are the queries.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.backends.online_softmax import Eager, LatentSoftmax, SoftmaxState
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed
from mla_conformance.backends.slots import slots_at
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS

_ROWS = 1024  # rows that go through their lists at once, so that the keys of a tile stay within 300 MiB


class EagerSparseBackend(LatentSoftmax, Eager, SelectedKeysBackend):
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_LAYOUTS)
    supported_extra_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_LAYOUTS)
    supported_index_spaces: ClassVar[list[str]] = list(IndexSpace)
    supports_topk_length: ClassVar[bool] = True
    supports_sink: ClassVar[bool] = True

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        self._model_dtype = q.dtype
        output = q.new_zeros(q.shape[0], self.num_heads, self.kv_lora_rank, dtype=torch.float32)
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        for start in range(0, q.shape[0], _ROWS):
            rows = slice(start, min(start + _ROWS, q.shape[0]))
            request = self._sparse_metadata.req_id_per_token[rows].long()
            state = self._attend(q[rows], request, [source.rows(rows) for source in sources], k_scale)
            # Rows were heads to the steps before.
            output[rows], lse[:, rows] = self._finish(SoftmaxState(*(part.transpose(0, 1) for part in state)))
        return self._with_sink(output, lse, sink).to(q.dtype), lse

    def _attend(self, q: Tensor, request: Tensor, sources: list[Selected], k_scale: Tensor) -> SoftmaxState:
        queries = q.transpose(0, 1)
        state = self._initial(queries, queries[..., : self.kv_lora_rank])
        for source in sources:
            visible = self._listed(source) & self._held(source)
            slots = self._slots(source, request).masked_fill(~visible, 0)  # nothing is dereferenced that is not listed
            for tile in self._tiles(source.indices.shape[1]):
                keys = self._keys(source, slots[:, tile], visible[:, tile], k_scale).transpose(0, 1)
                scores = self._scores(queries, keys).masked_fill(~visible[:, None, tile], -torch.inf)
                state = self._accumulate(state, scores, self._values(keys))
        return state

    def _listed(self, source: Selected) -> Tensor:
        return listed(source.indices, source.length)

    def _held(self, source: Selected) -> Tensor:
        """[T, K] bool: which of the named keys this rank holds; lists of its own numbers name no others."""
        if source.space is not IndexSpace.POSITION:
            return torch.ones_like(source.indices, dtype=torch.bool)
        metadata = self._sparse_metadata
        owner = source.indices // metadata.cp_kv_cache_interleave_size % metadata.dcp_world_size
        return owner == metadata.dcp_rank

    def _slots(self, source: Selected, request: Tensor) -> Tensor:
        """[T, K] int64 numbers of entries in the cache; anything where a list names no key of this rank."""
        if source.space is IndexSpace.SLOT:
            return source.indices.long()
        metadata, local = self._sparse_metadata, source.indices.long()
        if source.space is IndexSpace.POSITION:
            interleave = metadata.cp_kv_cache_interleave_size
            local = local // (interleave * metadata.dcp_world_size) * interleave + local % interleave
        if metadata.block_table is None:
            assert metadata.workspace_starts is not None
            return metadata.workspace_starts.long()[request].unsqueeze(1) + local
        return slots_at(metadata.block_table, request.unsqueeze(1), local, source.cache.shape[1])

    def _keys(self, source: Selected, slots: Tensor, visible: Tensor, k_scale: Tensor) -> Tensor:
        """[T, tile, D] float32; zeros where a list names no key: a weight of 0 times NaN is NaN."""
        keys = dequantise(self._entries(source, slots), source.layout, k_scale, self._model_dtype)
        keys = keys[..., : self.kv_lora_rank + self.qk_rope_head_dim]
        return keys.masked_fill(~visible.unsqueeze(-1), 0.0)

    def _entries(self, source: Selected, slots: Tensor) -> Tensor:
        return gather(source.cache, slots, source.layout)

    def _with_sink(self, output: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        if sink is None:
            return output
        share = torch.sigmoid(lse - sink.unsqueeze(1))
        # Without keys there is nothing to share, whatever the sink is.
        return output * share.nan_to_num(0.0).mT.unsqueeze(-1)
