"""Entries that are written wrongly: to other places, with other scales, or over what is not theirs."""

import torch

from mla_conformance.backends.cache import NO_SLOT
from mla_conformance.backends.eager_cache import EagerCacheBackend, memory_of
from mla_conformance.defects.bases import packed
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.quantization import E4M3_MAX

_LATENTS_TOO, _VALUES_TOO = ("latent_write",), ("written_values",)


class _Entries(EagerCacheBackend):
    """Bytes of entries of one layout are other ones than they should be."""

    layout: str

    def _tiled(self, keys, form):
        entries = super()._tiled(keys, form)
        return self._changed(entries, form) if form.name == self.layout else entries


class _Placed(EagerCacheBackend):
    """Entries of one layout are written to other places of their page than readers expect."""

    layout: str
    _writes = False

    def _store(self, cache, entries, slots):
        self._writes = True
        super()._store(cache, entries, slots)
        self._writes = False

    def _in_page(self, token, page, width):
        if self._writes and self.kv_cache_dtype == self.layout:
            return self._place(token.unsqueeze(1), page, torch.arange(width, device=token.device))
        return super()._in_page(token, page, width)

    def _place(self, token, page, byte):
        """[T, width]; by default entry by entry."""
        return token * len(byte) + byte


class _Scales(EagerCacheBackend):
    """Scales of tiles are other ones than they should be."""

    def _tile_scales(self, largest, form):
        if form.scales != "float32" or form.cache == "index":
            return super()._tile_scales(largest, form)
        scales = self._of(largest)
        return scales, scales


@known_defect("cache-written-as-if-pages-were-packed", killed_by="latent_write")
class WritesPackedPages(EagerCacheBackend):
    """A block is found by its own bytes, whatever the stride between blocks is."""

    def _store(self, cache, entries, slots):
        super()._store(packed(cache), entries, slots)


@known_defect("padding-slot-writes-slot-0", killed_by="latent_write")
class PaddingWritesTheFirstSlot(EagerCacheBackend):
    """Rows whose slot is -1 are written to slot 0."""

    def _store(self, cache, entries, slots):
        super()._store(cache, entries, slots.clamp(min=0))


@known_defect("padding-slot-writes-the-last-slot", killed_by="latent_write")
class PaddingWritesTheLastSlot(EagerCacheBackend):
    """Slot -1 counts from the end of the cache."""

    def _store(self, cache, entries, slots):
        super()._store(cache, entries, slots % (cache.shape[0] * cache.shape[1]))


@known_defect("int64-slots-read-as-int32", killed_by="latent_write")
class SlotsInHalves(EagerCacheBackend):
    """A slot mapping of int64 is read as one of int32, half of whose numbers are upper halves."""

    def _store(self, cache, entries, slots):
        super()._store(cache, entries, slots.contiguous().view(torch.int32)[: len(slots)])


@known_defect("only-the-first-token-written", killed_by="latent_write")
class WritesOneToken(EagerCacheBackend):
    """Of several tokens in a call only the first one is written."""

    def _store(self, cache, entries, slots):
        super()._store(cache, entries[:1], slots[:1])


@known_defect("tokens-of-a-page-clobber-each-other", killed_by="latent_write")
class LastTokenOfThePage(EagerCacheBackend):
    """Each token writes its whole page back as it was read, so that the last token of a page is all that stays."""

    def _store(self, cache, entries, slots):
        page = slots // cache.shape[1]
        later = (page.unsqueeze(1) == page) & torch.ones_like(page.unsqueeze(1) == page).triu(1)
        super()._store(cache, entries, torch.where(later.any(dim=1), NO_SLOT, slots))


@known_defect("slots-cut-at-the-first-padding", killed_by="latent_write")
class StopsAtPadding(EagerCacheBackend):
    """The first slot of -1 ends the writing, although tokens of other ranks stand in between."""

    def _store(self, cache, entries, slots):
        stop = int((slots == NO_SLOT).int().argmax()) if bool((slots == NO_SLOT).any()) else len(slots)
        super()._store(cache, entries, slots[:stop])


@known_defect("page-tail-zeroed-by-the-writer", killed_by="latent_write")
class ZeroesThePage(EagerCacheBackend):
    """What follows the last token of a call in its page is filled with zeros."""

    def _store(self, cache, entries, slots):
        super()._store(cache, entries, slots)
        last, page = int(slots.max()) + 1, cache.shape[1]
        behind = torch.arange(last, -(-last // page) * page, device=slots.device)
        super()._store(cache, entries.new_zeros(len(behind), entries.shape[1]), behind)


@known_defect("entry-stored-in-whole-vectors", killed_by="latent_write")
class StoresWholeVectors(EagerCacheBackend):
    """An entry is stored in vectors of 128 bytes, the last of which reaches into the next entry."""

    def _store(self, cache, entries, slots):
        padded = -(-entries.shape[1] // 128) * 128
        if padded > entries.shape[1] and len(slots):
            end = self._addresses(cache, slots[slots >= 0].long())[:, -1:] + 1
            behind = end + torch.arange(padded - entries.shape[1], device=end.device)
            memory = memory_of(cache)
            memory[behind[behind < len(memory)]] = 0
        super()._store(cache, entries, slots)


@known_defect("pool-written-past-its-end", killed_by="latent_write")
class OverwritesTheNextPool(EagerCacheBackend):
    """Blocks count from 1, so entries of the last land in the pool behind."""

    def _store(self, cache, entries, slots):
        start = cache.storage_offset() + cache.stride(0)
        super()._store(cache.as_strided(cache.shape, cache.stride(), start), entries, slots)


@known_defect("writer-slots-in-16-bits", killed_by="latent_write")
class SlotsInSixteenBits(EagerCacheBackend):
    """A slot from 2^15 on is cut to 15 bits."""

    def _store(self, cache, entries, slots):
        super()._store(cache, entries, torch.where(slots < 0, slots, slots % 2**15))


@known_defect("rope-read-with-the-stride-of-latents", killed_by="latent_write")
class RopeFromOtherColumns(EagerCacheBackend):
    """Rotated keys are read as if packed, from columns of a wider projection."""

    def _latent_entries(self, kv_c, k_pe, k_scale):
        if k_pe.shape[1] and k_pe.stride(0) != k_pe.shape[1] and len(k_pe) > 1:
            k_pe = k_pe.as_strided(k_pe.shape, (k_pe.shape[1], 1), k_pe.storage_offset())
        return super()._latent_entries(kv_c, k_pe, k_scale)


@known_defect("latent-and-rope-change-places", killed_by="latent_write")
class RopeFirst(EagerCacheBackend):
    """A plain entry holds the rotated key before the latent."""

    def _latent_entries(self, kv_c, k_pe, k_scale):
        if self.kv_cache_dtype == "auto":
            return torch.cat((k_pe, kv_c), dim=1).view(torch.uint8)
        return super()._latent_entries(kv_c, k_pe, k_scale)


@known_defect("fp8-written-without-its-scale", killed_by="latent_write")
class WithoutScale(EagerCacheBackend):
    """Codes of an fp8 cache are of the values as they are."""

    def _latent_entries(self, kv_c, k_pe, k_scale):
        return super()._latent_entries(kv_c, k_pe, torch.ones_like(k_scale))


@known_defect("fp8-codes-overflow", killed_by="written_values", related=_LATENTS_TOO)
class OverflowsToNaN(EagerCacheBackend):
    """Values beyond the largest code become NaN."""

    def _latent_entries(self, kv_c, k_pe, k_scale):
        entries = super()._latent_entries(kv_c, k_pe, k_scale)
        if self.kv_cache_dtype != "fp8":
            return entries
        beyond = (torch.cat((kv_c, k_pe), dim=1).float() / k_scale).abs() > E4M3_MAX
        return entries.masked_fill(beyond, 0x7F)


@known_defect("tile-scale-has-a-floor", killed_by="written_values")
class ScaleWithFloor(_Scales):
    """Float32 scales of tiles are 1e-4 at least, as those that are powers of two."""

    def _of(self, largest):
        least = (largest / E4M3_MAX).clamp(min=1e-4)
        return least.log2().ceil().exp2() if self.tile_scales == "pow2" else least


@known_defect("tile-scale-of-two-rounded-down", killed_by="latent_write")
class ScalesRoundedDown(_Scales):
    """Powers of two are rounded down, so that the largest values saturate."""

    def _of(self, largest):
        least = (largest / E4M3_MAX).clamp(min=1e-4)
        return least.log2().floor().exp2() if self.tile_scales == "pow2" else least


@known_defect("one-scale-for-all-tiles", killed_by="latent_write")
class OneScaleForAllTiles(EagerCacheBackend):
    """All tiles of an entry get the scale of the largest value in it."""

    def _largest(self, tiles):
        largest = super()._largest(tiles)
        return largest.amax(dim=1, keepdim=True).expand_as(largest)


@known_defect("zero-tile-divides-by-zero", killed_by="written_values", related=_LATENTS_TOO)
class ZeroTileBecomesNaN(_Scales):
    """A tile of zeros has the scale 0, and codes that are no numbers."""

    def _of(self, largest):
        return largest / E4M3_MAX


@known_defect("v4-scales-written-into-the-entry", killed_by="latent_write")
class ScalesBesideCodes(_Placed):
    """Scales of V4 are written behind the data of their entry, not behind all data of the page."""

    layout = "fp8_v4"


@known_defect("nvfp4-scales-written-into-the-entry", killed_by="latent_write")
class ScalesOfNVFP4BesideCodes(_Placed):
    """Scales of V4's NVFP4 entries are written into the entry, not behind the page."""

    layout = "nvfp4_v4"


@known_defect("writer-lacks-nvfp4", killed_by="latent_write")
class LacksNVFP4(EagerCacheBackend):
    """The fused writer has no branch for NVFP4 entries, although the layout is declared."""

    def _tiled(self, keys, form):
        if form.name == "nvfp4_ds_mla":
            raise NotImplementedError(f"unsupported kv_cache_dtype {form.name}")
        return super()._tiled(keys, form)


@known_defect("nvfp4-halves-change-places", killed_by="latent_write")
class HalvesSwapped(_Entries):
    """Of two codes in a byte the first has the high half."""

    layout = "nvfp4_ds_mla"

    def _changed(self, entries, form):
        codes, rest = entries.tensor_split([form.code_bytes], dim=1)
        return torch.cat((codes >> 4 | codes << 4, rest), dim=1)


@known_defect("nvfp4-rope-scaled-as-a-tile", killed_by="latent_write")
class RopeOfNVFP4Scaled(_Entries):
    """Rotated keys beside NVFP4 codes are divided by a scale that no reader knows."""

    layout = "nvfp4_ds_mla"

    def _changed(self, entries, form):
        start, stop = form.code_bytes, form.code_bytes + form.plain_bytes
        rope = entries[:, start:stop].contiguous().view(torch.float8_e4m3fn).float() / 6
        return torch.cat((entries[:, :start], rope.to(torch.float8_e4m3fn).view(torch.uint8), entries[:, stop:]), dim=1)


@known_defect("index-written-flat-read-shuffled", killed_by="index_write")
class WritesUnshuffled(_Placed):
    """Codes of a shuffled page are written token after token."""

    layout = "fp8_index_shuffled"

    def _place(self, token, page, byte):
        codes, scales = byte.tensor_split([self.kv_lora_rank])
        first = token * len(codes) + codes
        return torch.cat((first, page * len(codes) + token * len(scales) + scales - len(codes)), dim=1)


@known_defect("index-scales-written-beside-codes", killed_by="index_write", related=_VALUES_TOO)
class WritesInterleaved(_Placed):
    """A key's scale is written behind its codes, where readers expect the codes of the next one."""

    layout = "fp8_index"


@known_defect("index-ue8m0-skipped", killed_by="index_write", related=_VALUES_TOO)
class KeyScalesOfAnyKind(EagerCacheBackend):
    """Scales of index keys stay arbitrary numbers where powers of two are asked for."""

    def _tile_scales(self, largest, form):
        if form.cache != "index":
            return super()._tile_scales(largest, form)
        scales = largest.clamp(min=1e-4) / E4M3_MAX
        return scales, scales


@known_defect("index-scale-stored-in-bf16", killed_by="index_write", related=_VALUES_TOO)
class KeyScalesInBF16(EagerCacheBackend):
    """The scale of an index key is stored as the bits of a bfloat16 number."""

    def _tiled(self, keys, form):
        entries = super()._tiled(keys, form)
        if form.cache != "index":
            return entries
        scales = entries[:, form.code_bytes :].contiguous().view(torch.float32).bfloat16().view(torch.uint8)
        return torch.cat((entries[:, : form.code_bytes], scales, torch.zeros_like(scales)), dim=1)


@known_defect("index-scale-of-half-the-range", killed_by="index_write", related=_VALUES_TOO)
class KeyScalesOfHalfTheRange(EagerCacheBackend):
    """Index keys are scaled to 240, the largest code of another e4m3 than the one that is stored."""

    def _tile_scales(self, largest, form):
        if form.cache != "index" or self.tile_scales == "pow2":
            return super()._tile_scales(largest, form)
        scales = largest.clamp(min=1e-4) / 240
        return scales, scales


@known_defect("index-scale-per-page", killed_by="index_write", related=_VALUES_TOO)
class OneScaleForTheCall(EagerCacheBackend):
    """All keys of a call have the scale of the largest one."""

    def _largest(self, tiles):
        largest = super()._largest(tiles)
        indexes = TILED_FORMATS[self.kv_cache_dtype].cache == "index"
        return largest.amax().expand_as(largest) if indexes and len(largest) else largest
