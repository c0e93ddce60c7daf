"""EAGER, decode: an honest online softmax over pages of latents, one request after the other, tile by tile."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, decode
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.online_softmax import Eager, LatentSoftmax, SoftmaxState


class EagerLatentDecode(LatentSoftmax, Eager, decode.LatentDecode):
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8", "fp8_ds_mla"]
    supported_query_len: ClassVar[int | None] = None
    supports_nonuniform_queries: ClassVar[bool] = True
    supports_causal_dcp: ClassVar[bool] = True
    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",), emulated=True, batch_invariant=True)

    def _run(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata = self._decode_metadata
        self._check(self, metadata, ql_nope, q_pe, kv_cache)
        self._model_dtype = ql_nope.dtype
        q = torch.cat((ql_nope, q_pe), dim=-1)
        output = q.new_zeros(q.shape[0], self.num_heads, self.kv_lora_rank, dtype=torch.float32)
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        starts = metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            state = self._attend(q[rows], request, seq_len, kv_cache, k_scale)
            output[rows], lse[:, rows] = self._finish(state)
        return output.to(ql_nope.dtype), lse

    def _attend(self, q: Tensor, request: int, seq_len: int, kv_cache: Tensor, k_scale: Tensor) -> SoftmaxState:
        return self._over(self._tiles(seq_len), q, request, seq_len, kv_cache, k_scale)

    def _over(
        self, tiles: Iterable[slice], q: Tensor, request: int, seq_len: int, kv_cache: Tensor, k_scale: Tensor
    ) -> SoftmaxState:
        state = self._initial(q, q[..., : self.kv_lora_rank])
        for tile in tiles:
            keys = self._dequantise(self._entries(kv_cache, request, tile), k_scale).unsqueeze(1)
            scores = self._scores(q, keys)
            scores = scores.masked_fill(~self._visible(q.shape[0], request, seq_len, tile), -torch.inf)
            state = self._accumulate(state, scores, self._values(keys))
        return state

    def _entries(self, kv_cache: Tensor, request: int, tile: slice) -> Tensor:
        tokens = torch.arange(tile.start, tile.stop, device=kv_cache.device)
        blocks = self._blocks(request, tokens // kv_cache.shape[1])
        # As bytes, since float8 cannot be indexed everywhere.
        rows = kv_cache.view(torch.uint8)[blocks, tokens % kv_cache.shape[1]]
        return rows.view(kv_cache.dtype)

    def _blocks(self, request: int, pages: Tensor) -> Tensor:
        return self._decode_metadata.block_table[request][pages].long()

    def _dequantise(self, rows: Tensor, k_scale: Tensor) -> Tensor:
        keys = cache_dtypes.dequantise(rows, self.kv_cache_dtype, k_scale, self._model_dtype)
        return keys[..., : self.kv_lora_rank + self.qk_rope_head_dim]

    def _visible(self, queries: int, request: int, seq_len: int, tile: slice) -> Tensor:
        """[T, tile] mask, bottom-right in the whole sequence: the queries stand at its last positions."""
        metadata = self._decode_metadata
        # A tensor stays one: a GPU would be waited for in every tile.
        total = seq_len if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens[request]
        last = torch.arange(-queries, 0, device=metadata.seq_lens.device).unsqueeze(1) + total
        return self._positions(metadata, tile) <= last

    def _positions(self, metadata: decode.MLACommonDecodeMetadata, tile: slice) -> Tensor:
        return decode.positions_of(metadata, torch.arange(tile.start, tile.stop, device=metadata.seq_lens.device))


class EagerDecodeBackend(EagerLatentDecode, decode.MLADecodeBackend):
    run_decode = EagerLatentDecode._run
