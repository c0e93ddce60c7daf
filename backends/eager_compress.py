"""EAGER, compressor: states of tokens stored, gathered, pooled, normalised and rotated in float32."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import compress, eager_prepare, online_softmax, operands


class EagerCompressBackend(online_softmax.Eager, compress.MLACompressBackend):
    """Every convention; the state of a token is its key state, and its scores with what belongs to its place."""

    supported_input_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @operands.takes(compress.MLACompressBackend.run_compress)
    def run_compress(self, x: Any) -> None:
        metadata = self._compress_metadata
        compress.check_compress_call(self, metadata, x)
        logits = x.score.float() + x.ape[self._places(metadata.positions)]
        self._store(x.state_cache, torch.cat((x.kv.float(), logits), dim=1), self._state_slots())
        ends = self._ends().nonzero()[:, 0]
        k, logits = self._gathered(x.state_cache, ends)
        entries = self._pooled(k, logits)
        if self.compression.norm:
            entries = self._normed(entries, x.norm_weight)
        entries = self._rotated(entries, x.cos_sin_cache[self._angles(metadata.positions[ends])])
        self._store(x.kv_cache, entries.to(x.kv_cache.dtype), self._slots(x.kv_cache.shape[1])[ends])

    def _places(self, positions: Tensor) -> Tensor:
        return positions % self.compression.ratio

    def _ends(self) -> Tensor:
        return self._compress_metadata.slot_mapping >= 0

    def _slots(self, page: int) -> Tensor:
        return self._compress_metadata.slot_mapping

    def _state_slots(self) -> Tensor:
        return self._compress_metadata.state_slot_mapping

    def _store(self, cache: Tensor, rows: Tensor, slots: Tensor) -> None:
        kept = slots >= 0
        cache[slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]] = rows[kept]

    def _window(self, ends: Tensor) -> Tensor:
        """[E, W] positions of the tokens that the groups of these rows [E] take; negative before the first."""
        span = self.compression.ratio * (2 if self.compression.overlap else 1)
        last = self._compress_metadata.positions[ends].unsqueeze(1)
        return last - span + 1 + torch.arange(span, device=ends.device)

    def _gathered(self, state_cache: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        positions, page = self._window(ends), state_cache.shape[1]
        at = positions.clamp(min=0)
        blocks = self._state_blocks(self._compress_metadata.req_id_per_token[ends].long().unsqueeze(1), at // page)
        k, logits = (self._halves(x) for x in state_cache[blocks, at % page].chunk(2, dim=-1))
        missing = self._missing(positions).unsqueeze(-1)
        return k.masked_fill(missing, 0.0), logits.masked_fill(missing, -torch.inf)

    def _state_blocks(self, requests: Tensor, columns: Tensor) -> Tensor:
        return self._compress_metadata.state_block_table[requests, columns].long()

    def _missing(self, positions: Tensor) -> Tensor:
        return positions < 0

    def _halves(self, x: Tensor) -> Tensor:
        """[E, W, D] of the columns [E, W, C · D]: the first ones of the group before, the last ones of the own."""
        if not self.compression.overlap:
            return x
        before, own = x.tensor_split(2, dim=1)
        return torch.cat((before.chunk(2, dim=-1)[0], own.chunk(2, dim=-1)[1]), dim=1)

    def _pooled(self, k: Tensor, logits: Tensor) -> Tensor:
        return (logits.softmax(dim=1) * k).sum(dim=1)

    def _normed(self, entries: Tensor, weight: Tensor) -> Tensor:
        return entries * (entries.square().mean(dim=-1, keepdim=True) + self.compression.eps).rsqrt() * weight

    def _angles(self, ends: Tensor) -> Tensor:
        """[E] positions that entries of groups with these last ones are rotated by: those of the first ones."""
        return ends // self.compression.ratio * self.compression.ratio

    def _rotated(self, entries: Tensor, turns: Tensor) -> Tensor:
        plain, x = entries.tensor_split([entries.shape[-1] - turns.shape[-1]], dim=-1)
        cos, sin = turns.chunk(2, dim=-1)
        return torch.cat((plain, eager_prepare.rotated_pairs(x, cos, sin, is_neox_style=False)), dim=-1)
