"""EAGER, indexer: honest scores and their best in float32, request by request and tile by tile of its tokens."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, indexer, online_softmax
from mla_conformance.backends.roles import INDEX_LAYOUTS, IndexSpace
from mla_conformance.backends.slots import slots_at
from mla_conformance.reference.selected import NO_KEY

_ROWS = 256  # rows that are scored at once, so that the products of 64 heads with a tile stay within 32 MiB


class EagerIndexerBackend(online_softmax.Eager, indexer.MLAIndexerBackend):
    token_tile: ClassVar[int] = 512
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(INDEX_LAYOUTS)
    supported_index_spaces: ClassVar[list[str]] = [IndexSpace.POSITION, IndexSpace.SLOT]

    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        indexer.check_index_call(self, (q, weights, k, k_scale), "logits")
        return self._logits(q, weights, k, k_scale)

    def run_index_topk(
        self, q: Tensor, weights: Tensor, k: Tensor, topk_tokens: int, k_scale: Tensor | None = None
    ) -> Tensor:
        indexer.check_index_call(self, (q, weights, k, k_scale), "topk", topk_tokens)
        chosen = self._choose(self._logits(q, weights, k, k_scale), topk_tokens)
        return torch.where(chosen == NO_KEY, NO_KEY, self._numbers(k, chosen)).int()

    def _logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None) -> Tensor:
        metadata, bounds = self._sparse_metadata, self._bounds()
        logits = q.new_full((len(q), metadata.max_seq_len), -torch.inf, dtype=torch.float32)
        starts = metadata.query_lens_cpu.cumsum(0) - metadata.query_lens_cpu
        for request, (start, length) in enumerate(zip(starts.tolist(), metadata.query_lens_cpu.tolist(), strict=True)):
            for tile in self._tiles(self._tokens(k, request)):
                keys = self._keys(k, k_scale, request, torch.arange(tile.start, tile.stop, device=k.device))
                for first in range(start, start + length, _ROWS):
                    rows = slice(first, min(first + _ROWS, start + length))
                    logits[rows, tile] = self._scores(q[rows].float(), weights[rows], keys)
        positions = torch.arange(metadata.max_seq_len, device=q.device)
        return logits.masked_fill(positions >= bounds.unsqueeze(1), -torch.inf)

    def _bounds(self) -> Tensor:
        return indexer.bounds_of(self._sparse_metadata)

    def _tokens(self, k: Tensor, request: int) -> int:
        return int(self._sparse_metadata.seq_lens_cpu[request])

    def _tiles(self, tokens: int) -> Iterator[slice]:
        return (slice(start, min(start + self.token_tile, tokens)) for start in range(0, tokens, self.token_tile))

    def _keys(self, k: Tensor, k_scale: Tensor | None, request: int, positions: Tensor) -> Tensor:
        values, scales = self._stored(k, k_scale, self._slots(k, torch.full_like(positions, request), positions))
        return values if scales is None else values * self._scales(scales)

    def _stored(self, k: Tensor, k_scale: Tensor | None, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """What stands in slots: values or codes [tile, D] in float32, and the scales [tile, 1] of codes."""
        if self._sparse_metadata.block_table is None:
            values = k.view(torch.uint8)[slots].view(k.dtype).float()  # as bytes: float8 cannot be indexed everywhere
            return values, None if k_scale is None else k_scale[slots].unsqueeze(1)
        entries = cache_dtypes.gather(k, slots, self.kv_cache_dtype)
        if self.kv_cache_dtype == "auto":
            return entries.float(), None
        codes, scales = (part.contiguous() for part in entries.tensor_split([self.head_dim], dim=1))
        return codes.view(torch.float8_e4m3fn).float(), scales.view(torch.float32)

    def _scales(self, scales: Tensor) -> Tensor:
        return scales

    def _scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """[n, tile] of some rows, q [n, H, D] and weights [n, H], for keys [tile, D]; all float32."""
        dots = (q.flatten(0, 1) @ keys.mT).view(*q.shape[:2], len(keys))
        return (weights.unsqueeze(1) @ self._activated(dots)).squeeze(1)

    def _activated(self, dots: Tensor) -> Tensor:
        return dots.relu()

    def _choose(self, logits: Tensor, topk_tokens: int) -> Tensor:
        best = logits.topk(min(topk_tokens, logits.shape[1]), dim=1)
        chosen = best.indices.masked_fill(best.values == -torch.inf, NO_KEY)
        return torch.nn.functional.pad(chosen, (0, topk_tokens - chosen.shape[1]), value=NO_KEY)

    def _numbers(self, k: Tensor, positions: Tensor) -> Tensor:
        if self._sparse_metadata.index_space is IndexSpace.POSITION:
            return positions
        request = self._sparse_metadata.req_id_per_token.long().unsqueeze(1)
        return self._slots(k, request.expand_as(positions), positions.clamp(min=0))

    def _slots(self, k: Tensor, request: Tensor, positions: Tensor) -> Tensor:
        metadata = self._sparse_metadata
        if metadata.block_table is None:
            assert metadata.workspace_starts is not None
            return metadata.workspace_starts.long()[request] + positions
        return slots_at(metadata.block_table, request, positions, k.shape[1])
