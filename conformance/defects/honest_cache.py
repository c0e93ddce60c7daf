"""Honest cache operations, compressors, top-k and preparations of indices that differ legitimately from EAGER's."""

from heapq import nlargest
from itertools import pairwise
from typing import ClassVar

import torch

from mla_conformance.backends import eager_cache, eager_compress, eager_prepare, kernel
from mla_conformance.backends.cache import NO_SLOT, MLACacheBackend
from mla_conformance.backends.declaration import Declaration, Precision, SelectionForm, SelectionOrder, Ties
from mla_conformance.backends.eager_topk import LEAST, EagerTopKBackend
from mla_conformance.defects.bases import codes, note
from mla_conformance.defects.known import Honest, before, behind, but, instead, together
from mla_conformance.reference import indexer, selected
from mla_conformance.reference.quantization import E4M3_MAX


def _selects(**declared: object) -> Declaration:
    return Declaration(selection=SelectionForm(**declared), emulated=True)  # type: ignore[arg-type]


_COLUMNS = _selects(relative=False, order=SelectionOrder.ASCENDING, padding_behind=False)
"""Of the logits, not of the window, in their order and behind -1, all of which is declared; of no pools."""


def _placed(chosen: torch.Tensor, topk_tokens: int) -> torch.Tensor:
    """Columns of a mask [T, C] in their order, -1 behind them."""
    columns = torch.arange(chosen.shape[1], device=chosen.device).masked_fill(~chosen, chosen.shape[1])
    first = columns.sort(dim=1).values[:, :topk_tokens]
    first = torch.nn.functional.pad(first, (0, topk_tokens - first.shape[1]), value=chosen.shape[1])
    return first.masked_fill(first == chosen.shape[1], selected.NO_KEY)


class _Cache(eager_cache.EagerCacheBackend, Honest):
    dequantises_in_float64 = instead(
        "meaning", lambda entries, k_scale, dtype: (entries.double() * k_scale.double()).to(dtype), when=codes
    )

    class last_token_first:
        def _store(self, cache, entries, slots):
            for row in reversed(range(len(slots))):
                super()._store(cache, entries[row : row + 1], slots[row : row + 1])

        def run_write_latent(self, kv_c, k_pe, kv_cache, slot_mapping, k_scale):
            super().run_write_latent(kv_c, k_pe, kv_cache, slot_mapping, k_scale)
            return kv_cache

    class reciprocal_scales:
        def _latent_entries(self, kv_c, k_pe, k_scale):
            if self.kv_cache_dtype != "fp8":
                return super()._latent_entries(kv_c, k_pe, k_scale)
            quotients = torch.cat((kv_c, k_pe), dim=-1).float() * (1 / k_scale)
            return quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)

        def _largest(self, tiles):
            return super()._largest(tiles) * (1 - 2.0**-23)

    @but(when=lambda form: form.scales == "ue8m0")
    def scales_by_their_bits__tile_scales(self, largest, form):
        bits = (largest / E4M3_MAX).clamp(min=form.least_scale).view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        return (exponent << 23).view(torch.float32), exponent.to(torch.uint8)

    class zero_tiles_with_any_scale:
        def _tile_scales(self, largest, form):
            scales, stored = super()._tile_scales(largest, form)
            if form.scales == "float32":
                scales = stored = scales.where(largest > 0, 2.0**-30)
            return scales, stored

        def _tiled(self, keys, form):
            entries = super()._tiled(keys, form)
            if form.padding:
                entries[:, -form.padding :] = 0xEE
            return entries

    @but(when=lambda form: form.codes == "e4m3")
    def codes_of_zero_without_sign__behind_tiled(self, entries, *, form):
        codes = entries[:, : form.code_bytes]
        return torch.cat((codes.masked_fill(codes == 0x80, 0), entries[:, form.code_bytes :]), dim=1)

    def gathers_page_by_page__gathered(self, cache, slots):
        found = torch.empty(len(slots), cache.shape[2], dtype=cache.dtype, device=cache.device)
        page = slots // cache.shape[1]
        starts = [0, *(row for row in range(1, len(slots)) if page[row] != page[row - 1]), len(slots)]
        for first, stop in reversed(list(pairwise(starts))):
            rows = super()._gathered(cache, slots[first:stop]).view(torch.uint8)
            found.view(torch.uint8)[first:stop] = rows
        return found

    def long_vectors__gathered(self, cache, slots):
        """Bytes are read in whole vectors of 8 around them, of which the others are dropped."""
        memory, addresses = eager_cache.memory_of(cache), self._addresses(cache, slots)
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


class OneWriterAlone(MLACacheBackend):
    """It writes plain and fp8 entries to slots of int64, declares nothing else, and refuses it."""

    supported_calls: ClassVar = ["write_latent"]
    supported_kv_cache_dtypes: ClassVar = ["auto", "fp8"]

    @staticmethod
    def get_name():
        return "ALONE"

    def run_write_latent(self, kv_c, k_pe, kv_cache, slot_mapping, k_scale):
        layout = self.kv_cache_dtype
        if layout not in self.supported_kv_cache_dtypes or slot_mapping.dtype != torch.int64:
            raise kernel.UnsupportedConfiguration(f"{layout} entries, slots of {slot_mapping.dtype}")
        writer = eager_cache.EagerCacheBackend(self.kv_lora_rank, self.qk_rope_head_dim, layout, self.tile_scales, None)
        writer.run_write_latent(kv_c, k_pe, kv_cache, slot_mapping, k_scale)


class _Compress(eager_compress.EagerCompressBackend, Honest):
    def running_softmax__pooled(self, k, logits):
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
        def run_compress(self, kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache):
            self._ape = ape
            super().run_compress(kv, score, torch.zeros_like(ape), norm_weight, cos_sin_cache, state_cache, kv_cache)

        def _pooled(self, k, logits):
            at = torch.cat(self._ape.chunk(2 if self.compression.overlap else 1, dim=1))
            return super()._pooled(k.double(), logits.double() + at).float()

    class from_the_call_itself:
        """Tokens of the call are read as they came, states for those before it; only begun groups are stored."""

        def run_compress(self, kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache):
            logits = score.float() + ape[self._places(self._compress_metadata.positions)]
            self._own = torch.cat((kv.float(), logits), dim=1)
            super().run_compress(kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache)

        def _state_slots(self):
            metadata, span = self._compress_metadata, self.compression.ratio
            first = (metadata.seq_lens.long() // span - int(self.compression.overlap)) * span
            return super()._state_slots().where(metadata.positions >= first[metadata.req_id_per_token.long()], -1)

        def _gathered(self, state_cache, ends):
            k, logits = super()._gathered(state_cache, ends)
            positions, metadata = self._window(ends), self._compress_metadata
            own = metadata.req_id_per_token[ends].long()
            begun = (metadata.seq_lens.long() - metadata.query_start_loc.long().diff())[own].unsqueeze(1)
            row = (metadata.query_start_loc.long()[own].unsqueeze(1) + positions - begun).clamp(min=0)
            here = ((positions >= begun) & (positions >= 0)).unsqueeze(-1)
            new_k, new_logits = map(self._halves, self._own[row].chunk(2, dim=-1))
            return torch.where(here, new_k, k), torch.where(here, new_logits, logits)


class _TopK(EagerTopKBackend, Honest):
    columns_of_the_logits = instead(
        "numbered", lambda self, chosen, starts: chosen.sort(dim=1).values, supports_pools=False, declaration=_COLUMNS
    )
    tail_before_pools = together(
        behind("run_pool_top_k_per_row", lambda lists: lists.flip(1)),
        before("expanded", lambda pools: pools.sort(dim=1).values),
    )

    @but(declaration=_selects(order=SelectionOrder.ASCENDING, ties=Ties.LAST))
    def radix_selection__choose(self, keys, topk_tokens):
        """Histograms of eight bits each find the threshold; of those that tie with it the last are taken."""
        bits = (keys + 2**32).where(keys != LEAST, 0)
        left = (keys != LEAST).sum(dim=1).clamp(max=topk_tokens)
        prefix = torch.zeros_like(left)
        for shift in range(32, -1, -8):
            digit = torch.where((bits >> (shift + 8)) == prefix.unsqueeze(1), bits >> shift & 0xFF, -1)
            counts = keys.new_zeros(len(keys), 257).scatter_add_(1, digit + 1, torch.ones_like(digit))[:, 1:]
            above = counts.flip(1).cumsum(dim=1).flip(1) - counts
            found = ((above < left.unsqueeze(1)) & (above + counts >= left.unsqueeze(1))).int().argmax(dim=1)
            left = left - above.gather(1, found.unsqueeze(1))[:, 0]
            prefix = prefix << 8 | found
        tied = (bits == prefix.unsqueeze(1)) & (keys != LEAST)
        taken = tied.flip(1).cumsum(dim=1).flip(1) <= left.unsqueeze(1)
        return _placed((bits > prefix.unsqueeze(1)) | (tied & taken), topk_tokens)

    @but(declaration=_selects(order=SelectionOrder.DESCENDING, ties=Ties.FIRST))
    def sorted_rows__choose(self, keys, topk_tokens):
        ordered = keys.sort(dim=1, descending=True, stable=True)
        chosen = ordered.indices.masked_fill(ordered.values == LEAST, selected.NO_KEY)[:, :topk_tokens]
        return torch.nn.functional.pad(chosen, (0, topk_tokens - chosen.shape[1]), value=selected.NO_KEY)

    @but(declaration=_selects(order=SelectionOrder.DESCENDING))
    def heap_of_each_row__choose(self, keys, topk_tokens):
        chosen = torch.full((len(keys), topk_tokens), selected.NO_KEY)
        for row, values in enumerate(keys.tolist()):
            seen = ((key, column) for column, key in enumerate(values) if key != LEAST)
            best = [column for _, column in nlargest(topk_tokens, seen)]
            chosen[row, : len(best)] = torch.tensor(best, dtype=torch.int64)
        return chosen.to(keys.device)

    @but(declaration=_selects())
    def split_rows__choose(self, keys, topk_tokens):
        wide = torch.nn.functional.pad(keys, (0, -keys.shape[1] % 256), value=LEAST)
        parts = wide.unflatten(1, (-1, 256)).topk(min(topk_tokens, 256), dim=2)
        starts = torch.arange(parts.indices.shape[1], device=keys.device).unsqueeze(1) * 256
        columns = (parts.indices + starts).flatten(1)
        best = super()._choose(parts.values.flatten(1), topk_tokens)
        return columns.gather(1, best.clamp(min=0)).masked_fill(best == selected.NO_KEY, selected.NO_KEY)

    @but(declaration=_selects())
    def bits_of_zeros__keys(self, logits):
        """Logits are compared by their bits, +0 above -0, and NaN is never selected."""
        bits = logits.float().view(torch.int32).long()
        return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF) - 1).masked_fill(logits.isnan(), LEAST)

    @but(declaration=_selects())
    def flushes_subnormals__before_keys(self, logits):
        values = logits.float()
        return values.masked_fill(values.abs() < torch.finfo(torch.float32).smallest_normal, 0.0)


class _Prepare(eager_prepare.EagerPrepareBackend, Honest):
    stored_intermediates = together(
        before("query", lambda self, q: note(self, _model=q.dtype)),
        behind("normed", lambda self, normed: self._stored(normed)),
        instead("stored", lambda self, x: x.to(self._model).float()),
        declaration=Declaration(intermediates=Precision.MODEL, emulated=True),
    )
    prepares_in_float64 = together(
        instead("query", lambda self, q: q.double()),
        before("normed", k=torch.Tensor.double, weight=torch.Tensor.double, bias=torch.Tensor.double),
        instead("transformed", lambda self, x: x @ indexer.sylvester(x.shape[-1], x.device)),
        before("scales", largest=torch.Tensor.float),
    )

    def butterflies__transformed(self, x):
        y, width = x * x.shape[-1] ** -0.5, 1
        while width < x.shape[-1]:
            a, b = y.unflatten(-1, (-1, 2, width)).unbind(-2)
            y, width = torch.stack((a + b, a - b), dim=-2).flatten(-3), 2 * width
        return y

    def one_pass_norm__normed(self, k, weight, bias):
        mean, square = k.mean(-1, keepdim=True), k.square().mean(-1, keepdim=True)
        deviation = ((square - mean.square()).clamp(min=0) + self.preparation.eps).rsqrt()
        return (k - mean) * deviation * weight + bias

    class reciprocals:
        """Scales are multiples of 1/448 and codes of the reciprocal of their scale; factors are folded one by one."""

        def _scales(self, largest):
            scale = largest.clamp(min=1e-4) * (1 / E4M3_MAX)
            return self._power(scale) if self.preparation.scale_format == "pow2" else scale

        def _quantised(self, x):
            _, scale = super()._quantised(x)
            blocks = x.unflatten(-1, (scale.shape[-1], -1)) * (1 / scale).unsqueeze(-1)
            return blocks.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2), scale

        def _folded(self, weights, q_scale):
            return weights * self.num_heads**-0.5 * q_scale[..., 0] * self.scale

    powers_by_bits = instead(
        "power", lambda self, x: ((x.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    )
