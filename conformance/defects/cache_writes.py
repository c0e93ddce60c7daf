"""Entries that are written wrongly: to other places, with other scales, or over what is not theirs."""

import torch

from mla_conformance.backends.cache import NO_SLOT
from mla_conformance.backends.eager_cache import EagerCacheBackend, memory_of
from mla_conformance.defects.bases import codes, packed, packed_rows, slots_of
from mla_conformance.defects.known import Defects, before, behind, but, instead, variant
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.quantization import E4M3_MAX

_LATENTS_TOO, _VALUES_TOO = ("latent_write",), ("written_values",)


class _Scales(EagerCacheBackend, Defects, killed_by="written_values", related=_LATENTS_TOO):
    """Scales of tiles are other ones than they should be."""

    def _tile_scales(self, largest, form):
        if form.scales != "float32" or form.cache == "index":
            return super()._tile_scales(largest, form)
        scales = self._of(largest)
        return scales, scales

    def _of(self, largest):
        least = (largest / E4M3_MAX).clamp(min=1e-4)
        return self.whole(least.log2()).exp2() if self.tile_scales == "pow2" else least

    zero_tile_divides_by_zero = instead("of", lambda self, largest: largest / E4M3_MAX)
    """A tile of zeros has the scale 0, and codes that are no numbers."""
    tile_scale_has_a_floor = variant(related=(), whole=torch.ceil)
    """Float32 scales of tiles are 1e-4 at least, as those that are powers of two."""
    tile_scale_of_two_rounded_down = variant(killed_by="latent_write", related=(), whole=torch.floor)
    """Powers of two are rounded down, so that the largest values saturate."""


class _LatentWrite(EagerCacheBackend, Defects, killed_by="latent_write"):
    cache_written_as_if_pages_were_packed = before("store", cache=packed)
    """A block is found by its own bytes, whatever the stride between blocks is."""
    padding_slot_writes_slot_0 = before("store", lambda slots: slots.clamp(min=0))
    """Rows whose slot is -1 are written to slot 0."""
    padding_slot_writes_the_last_slot = before("store", lambda slots, *, cache: slots % slots_of(cache))
    """Slot -1 counts from the end of the cache."""
    int64_slots_read_as_int32 = before("store", lambda slots: slots.contiguous().view(torch.int32)[: len(slots)])
    """A slot mapping of int64 is read as one of int32, half of whose numbers are upper halves."""
    slots_cut_at_the_first_padding = before("store", lambda slots: slots[(slots == NO_SLOT).cumsum(0) == 0])
    """The first slot of -1 ends the writing, although tokens of other ranks stand in between."""
    writer_slots_in_16_bits = before("store", lambda slots: torch.where(slots < 0, slots, slots % 2**15))
    """A slot from 2^15 on is cut to 15 bits."""
    fp8_written_without_its_scale = before("latent_entries", k_scale=torch.ones_like)
    """Codes of an fp8 cache are of the values as they are."""
    one_scale_for_all_tiles = behind("largest", lambda largest: largest.amax(dim=1, keepdim=True).expand_as(largest))
    """All tiles of an entry get the scale of the largest value in it."""
    only_the_first_token_written = before("store", lambda entries, slots: (entries[:1], slots[:1]))
    """Of several tokens in a call only the first one is written."""

    def tokens_of_a_page_clobber_each_other__before_store(self, slots, *, cache):
        """Each token writes its whole page back as it was read, so that the last token of a page is all that stays."""
        page = slots // cache.shape[1]
        later = (page.unsqueeze(1) == page).triu(1).any(dim=1)
        return torch.where(later, NO_SLOT, slots)

    def page_tail_zeroed_by_the_writer__store(self, cache, entries, slots):
        """What follows the last token of a call in its page is filled with zeros."""
        super()._store(cache, entries, slots)
        last, page = int(slots.max()) + 1, cache.shape[1]
        behind = torch.arange(last, -(-last // page) * page, device=slots.device)
        super()._store(cache, entries.new_zeros(len(behind), entries.shape[1]), behind)

    def entry_stored_in_whole_vectors__store(self, cache, entries, slots):
        """An entry is stored in vectors of 128 bytes, the last of which reaches into the next entry."""
        memory, end = memory_of(cache), self._addresses(cache, slots[slots >= 0].long())[:, -1:] + 1
        behind = end + torch.arange(-entries.shape[1] % 128, device=end.device)
        memory[behind[behind < len(memory)]] = 0
        super()._store(cache, entries, slots)

    def pool_written_past_its_end__before_store(self, cache):
        """Blocks count from 1, so entries of the last land in the pool behind."""
        return cache.as_strided(cache.shape, cache.stride(), cache.storage_offset() + cache.stride(0))

    def rope_read_with_the_stride_of_latents__before_latent_entries(self, k_pe):
        """Rotated keys are read as if packed, from columns of a wider projection."""
        return packed_rows(k_pe) if k_pe.shape[1] and len(k_pe) > 1 else k_pe

    def latent_and_rope_change_places__latent_entries(self, kv_c, k_pe, k_scale):
        """A plain entry holds the rotated key before the latent."""
        plain = self.kv_cache_dtype == "auto"
        return super()._latent_entries(*((k_pe, kv_c) if plain else (kv_c, k_pe)), k_scale)

    @but(killed_by="written_values", related=_LATENTS_TOO, when=codes)
    def fp8_codes_overflow__behind_latent_entries(self, entries, *, kv_c, k_pe, k_scale):
        """Values beyond the largest code become NaN."""
        beyond = (torch.cat((kv_c, k_pe), dim=1).float() / k_scale).abs() > E4M3_MAX
        return entries.masked_fill(beyond, 0x7F)

    def writer_lacks_nvfp4__before_tiled(self, form):
        """The fused writer has no branch for NVFP4 entries, although the layout is declared."""
        if form.name == "nvfp4_ds_mla":
            raise NotImplementedError(f"unsupported kv_cache_dtype {form.name}")

    @but(when=lambda form: form.name == "nvfp4_ds_mla")
    def nvfp4_halves_change_places__behind_tiled(self, entries, *, form):
        """Of two codes in a byte the first has the high half."""
        codes, rest = entries.tensor_split([form.code_bytes], dim=1)
        return torch.cat((codes >> 4 | codes << 4, rest), dim=1)

    @but(when=lambda form: form.name == "nvfp4_ds_mla")
    def nvfp4_rope_scaled_as_a_tile__behind_tiled(self, entries, *, form):
        """Rotated keys beside NVFP4 codes are divided by a scale that no reader knows."""
        codes, rope, rest = entries.tensor_split([form.code_bytes, form.code_bytes + form.plain_bytes], dim=1)
        scaled = (rope.contiguous().view(torch.float8_e4m3fn).float() / 6).to(torch.float8_e4m3fn)
        return torch.cat((codes, scaled.view(torch.uint8), rest), dim=1)


class _Placed(EagerCacheBackend, Defects, killed_by="latent_write"):
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

    v4_scales_written_into_the_entry = variant(layout="fp8_v4")
    """Scales of V4 are written behind the data of their entry, not behind all data of the page."""
    nvfp4_scales_written_into_the_entry = variant(layout="nvfp4_v4")
    """Scales of V4's NVFP4 entries are written into the entry, not behind the page."""
    index_scales_written_beside_codes = variant(killed_by="index_write", related=_VALUES_TOO, layout="fp8_index")
    """A key's scale is written behind its codes, where readers expect the codes of the next one."""

    @but(killed_by="index_write", layout="fp8_index_shuffled")
    def index_written_flat_read_shuffled__place(self, token, page, byte):
        """Codes of a shuffled page are written token after token."""
        codes, scales = byte.tensor_split([self.kv_lora_rank])
        first = token * len(codes) + codes
        return torch.cat((first, page * len(codes) + token * len(scales) + scales - len(codes)), dim=1)


class _IndexWrite(EagerCacheBackend, Defects, killed_by="index_write", related=_VALUES_TOO):
    @but(when=lambda form: form.cache == "index")
    def index_ue8m0_skipped__tile_scales(self, largest, form):
        """Scales of index keys stay arbitrary numbers where powers of two are asked for."""
        return (largest.clamp(min=1e-4) / E4M3_MAX,) * 2

    @but(when=lambda form: form.cache == "index")
    def index_scale_stored_in_bf16__behind_tiled(self, entries, *, form):
        """The scale of an index key is stored as the bits of a bfloat16 number."""
        scales = entries[:, form.code_bytes :].contiguous().view(torch.float32).bfloat16().view(torch.uint8)
        return torch.cat((entries[:, : form.code_bytes], scales, torch.zeros_like(scales)), dim=1)

    @but(when=lambda self, form: form.cache == "index" and self.tile_scales != "pow2")
    def index_scale_of_half_the_range__tile_scales(self, largest, form):
        """Index keys are scaled to 240, the largest code of another e4m3 than the one that is stored."""
        return (largest.clamp(min=1e-4) / 240,) * 2

    def index_scale_per_page__behind_largest(self, largest):
        """All keys of a call have the scale of the largest one."""
        indexes = TILED_FORMATS[self.kv_cache_dtype].cache == "index"
        return largest.amax().expand_as(largest) if indexes and len(largest) else largest
