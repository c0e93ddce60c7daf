"""Honest cache operations, compressors and selections over pools that differ legitimately from EAGER's."""

from itertools import pairwise
from typing import ClassVar

import torch

from mla_conformance.backends.cache import NO_SLOT, MLACacheBackend
from mla_conformance.backends.eager_cache import EagerCacheBackend, memory_of
from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.backends.eager_topk import EagerTopKBackend
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.defects.bases import emulations
from mla_conformance.defects.known import kernels
from mla_conformance.reference.quantization import E4M3_MAX

_UNUSED_BYTE = 0xEE


@kernels()
class _Cache(EagerCacheBackend):
    class last_token_first:
        """Tokens are written one by one, the last one first, and the cache is returned."""

        def _store(self, cache, entries, slots):
            for row in reversed(range(len(slots))):
                super()._store(cache, entries[row : row + 1], slots[row : row + 1])

        def run_write_latent(self, kv_c, k_pe, kv_cache, slot_mapping, k_scale):
            super().run_write_latent(kv_c, k_pe, kv_cache, slot_mapping, k_scale)
            return kv_cache

    class reciprocal_scales:
        """Values are multiplied by reciprocals, of scales and of the largest code."""

        def _latent_entries(self, kv_c, k_pe, k_scale):
            if self.kv_cache_dtype != "fp8":
                return super()._latent_entries(kv_c, k_pe, k_scale)
            quotients = torch.cat((kv_c, k_pe), dim=-1).float() * (1 / k_scale)
            return quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)

        def _largest(self, tiles):
            return super()._largest(tiles) * (1 - 2.0**-23)

    def scales_by_their_bits__tile_scales(self, largest, form):
        """Powers of two are rounded up by the exponent bits of float32 numbers."""
        if form.scales != "ue8m0":
            return super()._tile_scales(largest, form)
        bits = (largest / E4M3_MAX).clamp(min=form.least_scale).view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        return (exponent << 23).view(torch.float32), exponent.to(torch.uint8)

    class zero_tiles_with_any_scale:
        """Tiles of zeros, and keys of zeros, have another scale, and the unused byte of an entry is anything."""

        def _tile_scales(self, largest, form):
            scales, stored = super()._tile_scales(largest, form)
            if form.scales == "float32":
                scales = stored = scales.where(largest > 0, 2.0**-30)
            return scales, stored

        def _tiled(self, keys, form):
            entries = super()._tiled(keys, form)
            if form.padding:
                entries[:, -form.padding :] = _UNUSED_BYTE
            return entries

    def codes_of_zero_without_sign__behind_tiled(self, entries, *, form):
        """A value that rounds to zero is written as +0, whatever its sign."""
        if form.codes != "e4m3":
            return entries
        codes = entries[:, : form.code_bytes]
        return torch.cat((codes.masked_fill(codes == 0x80, 0), entries[:, form.code_bytes :]), dim=1)

    def gathers_page_by_page__gathered(self, cache, slots):
        """Runs of one page are copied after one another, those of the last request first."""
        found = torch.empty(len(slots), cache.shape[2], dtype=cache.dtype, device=cache.device)
        page = slots // cache.shape[1]
        starts = [0, *(row for row in range(1, len(slots)) if page[row] != page[row - 1]), len(slots)]
        for first, stop in reversed(list(pairwise(starts))):
            rows = super()._gathered(cache, slots[first:stop]).view(torch.uint8)
            found.view(torch.uint8)[first:stop] = rows
        return found

    def dequantises_in_float64__meaning(self, entries, k_scale, dtype):
        """Codes times their scales are float64 before they are rounded."""
        if self.kv_cache_dtype != "fp8":
            return super()._meaning(entries, k_scale, dtype)
        return (entries.double() * k_scale.double()).to(dtype)

    def long_vectors__gathered(self, cache, slots):
        """Bytes are read in whole vectors of 8 around them, of which the others are dropped."""
        memory, addresses = memory_of(cache), self._addresses(cache, slots)
        words = memory[: len(memory) // 8 * 8].view(torch.int64)
        vectors = words[(addresses // 8).clamp(max=len(words) - 1)]
        found = (vectors >> addresses % 8 * 8 & 0xFF).to(torch.uint8)
        return torch.where(addresses < 8 * len(words), found, memory[addresses]).view(cache.dtype)

    class virtual_blocks:
        """Slots on ranks by blocks of all ranks together, as vLLM computes them; of lists by a table of slots."""

        def run_slot_mapping(self, slot_mapping, query_start_loc, positions, block_table, block_size, **world):
            ranks, rank = world["dcp_world_size"], world["dcp_rank"]
            run, ratio = world["cp_kv_cache_interleave_size"], world["compress_ratio"]
            slot_mapping.fill_(NO_SLOT)
            for request, (first, stop) in enumerate(pairwise(query_start_loc.tolist())):
                for token in range(first, stop):
                    entry, rest = divmod(int(positions[token]), ratio)
                    column, offset = divmod(entry, block_size * ranks)
                    if rest == ratio - 1 and offset // run % ranks == rank:
                        within = offset // (ranks * run) * run + offset % run
                        slot_mapping[token] = int(block_table[request, column]) * block_size + within

        def run_global_slots(self, out, req_id_per_token, block_table, token_indices, block_size):
            offsets = torch.arange(block_size, device=out.device)
            slots = (block_table.long().unsqueeze(-1) * block_size + offsets).flatten(1)
            slots = torch.nn.functional.pad(slots, (1, 1), value=NO_SLOT)
            places = (token_indices.long() + 1).clamp(0, slots.shape[1] - 1)
            out.copy_(slots[req_id_per_token.long()].gather(1, places))


@kernels()
class _MLACache(MLACacheBackend):
    class one_writer_alone:
        """It writes plain and fp8 entries to slots of int64, declares nothing else, and refuses it."""

        supported_calls: ClassVar = ["write_latent"]
        supported_kv_cache_dtypes: ClassVar = ["auto", "fp8"]

        @staticmethod
        def get_name():
            return "ALONE"

        def run_write_latent(self, kv_c, k_pe, kv_cache, slot_mapping, k_scale):
            if self.kv_cache_dtype not in self.supported_kv_cache_dtypes or slot_mapping.dtype != torch.int64:
                raise UnsupportedConfiguration(f"{self.kv_cache_dtype} entries, slots of {slot_mapping.dtype}")
            writer = EagerCacheBackend(
                self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dtype, self.tile_scales, None
            )
            writer.run_write_latent(kv_c, k_pe, kv_cache, slot_mapping, k_scale)


@kernels()
class _Compress(EagerCompressBackend):
    def running_softmax__pooled(self, k, logits):
        """Tokens are added one after the other, the last first, under a running maximum."""
        maximum = torch.full_like(k[:, 0], -torch.inf)
        total, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for token in reversed(range(k.shape[1])):
            higher = torch.maximum(maximum, logits[:, token])
            shift = higher.masked_fill(higher == -torch.inf, 0.0)
            before, own = (maximum - shift).exp(), (logits[:, token] - shift).exp()
            total, weighted = total * before + own, weighted * before + own * k[:, token]
            maximum = higher
        return weighted / total

    def rounds_before_the_rotation__before_rotated__run_compress(self, entries, *, kv_cache):
        """A normalised entry is rounded to the cache's dtype before it is rotated, as V4.1's is."""
        return entries.to(kv_cache.dtype).float()

    class places_when_pooled:
        """States hold scores as they came; what belongs to places is added while they are pooled, in float64."""

        def run_compress(self, kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache):
            self._ape = ape
            super().run_compress(kv, score, torch.zeros_like(ape), norm_weight, cos_sin_cache, state_cache, kv_cache)

        def _pooled(self, k, logits):
            at = torch.cat(self._ape.chunk(2 if self.compression.overlap else 1, dim=1))
            return super()._pooled(k.double(), logits.double() + at).float()

    class from_the_call_itself:
        """Tokens of the call are read as they came, states only for those before it; nothing but begun groups is
        stored."""

        def run_compress(self, kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache):
            metadata = self._compress_metadata
            logits = score.float() + ape[self._places(metadata.positions)]
            self._own = torch.cat((kv.float(), logits), dim=1)
            super().run_compress(kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache)

        def _state_slots(self):
            metadata, span = self._compress_metadata, self.compression.ratio
            first = (metadata.seq_lens.long() // span - int(self.compression.overlap)) * span
            needed = metadata.positions >= first[metadata.req_id_per_token.long()]
            return super()._state_slots().where(needed, -1)

        def _gathered(self, state_cache, ends):
            k, logits = super()._gathered(state_cache, ends)
            positions, metadata = self._window(ends), self._compress_metadata
            own = metadata.req_id_per_token[ends].long()
            begun = (metadata.seq_lens.long() - metadata.query_start_loc.long().diff())[own].unsqueeze(1)
            row = (metadata.query_start_loc.long()[own].unsqueeze(1) + positions - begun).clamp(min=0)
            here = ((positions >= begun) & (positions >= 0)).unsqueeze(-1)
            new_k, new_logits = map(self._halves, self._own[row].chunk(2, dim=-1))
            return torch.where(here, new_k, k), torch.where(here, new_logits, logits)


@kernels()
class _TopK(EagerTopKBackend):
    class tail_before_pools:
        """The tokens of the last pool stand first, and -1 between them and those of pools in rising order."""

        def run_pool_top_k_per_row(self, logits, topk_tokens, pool, tail):
            return super().run_pool_top_k_per_row(logits, topk_tokens, pool, tail).flip(1)

        def _expanded(self, pools, pool):
            return super()._expanded(pools.sort(dim=1).values, pool)


HONEST_CACHES = (EagerCacheBackend, *(each for each in emulations(__name__) if issubclass(each, MLACacheBackend)))
HONEST_COMPRESSORS = (EagerCompressBackend, *(each for each in emulations(__name__) if each not in HONEST_CACHES))
"""Every honest emulation of a compressor, and of a selection over pools."""
