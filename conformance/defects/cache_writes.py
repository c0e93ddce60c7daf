"""Entries that are written wrongly: to other places, with other scales, or over what is not theirs."""

import torch

from mla_conformance.backends.cache import NO_SLOT
from mla_conformance.backends.eager_cache import EagerCacheBackend, memory_of
from mla_conformance.defects.bases import codes, packed, slots_of
from mla_conformance.defects.known import Defects, before, behind, but, instead, variant
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.quantization import E4M3_MAX


def _in_float32(form):
    return form.scales == "float32" and form.cache != "index"


def _with_a_floor(whole):
    """Scales of at least 1e-4, of those that are powers of two the ``whole`` exponent."""

    def scales(self, largest, form):
        least = (largest / E4M3_MAX).clamp(min=1e-4)
        return (whole(least.log2()).exp2() if self.tile_scales == "pow2" else least,) * 2

    return scales


class _Cache(EagerCacheBackend, Defects):
    zero_tile_divides_by_zero = instead(
        "tile_scales", lambda self, largest, form: (largest / E4M3_MAX,) * 2, when=_in_float32
    )
    tile_scale_has_a_floor = instead("tile_scales", _with_a_floor(torch.ceil), when=_in_float32)
    tile_scale_of_two_rounded_down = instead("tile_scales", _with_a_floor(torch.floor), when=_in_float32)
    cache_written_as_if_pages_were_packed = before("store", cache=packed)
    padding_slot_writes_slot_0 = before("store", lambda slots: slots.clamp(min=0))
    padding_slot_writes_the_last_slot = before("store", lambda slots, *, cache: slots % slots_of(cache))
    int64_slots_read_as_int32 = before("store", lambda slots: slots.contiguous().view(torch.int32)[: len(slots)])
    slots_cut_at_the_first_padding = before("store", lambda slots: slots[(slots == NO_SLOT).cumsum(0) == 0])
    writer_slots_in_16_bits = before("store", lambda slots: torch.where(slots < 0, slots, slots % 2**15))
    fp8_written_without_its_scale = before("latent_entries", k_scale=torch.ones_like)
    one_scale_for_all_tiles = behind("largest", lambda largest: largest.amax(dim=1, keepdim=True).expand_as(largest))
    only_the_first_token_written = before("store", lambda entries, slots: (entries[:1], slots[:1]))

    def tokens_of_a_page_clobber_each_other__before_store(self, slots, *, cache):
        page = slots // cache.shape[1]
        later = (page.unsqueeze(1) == page).triu(1).any(dim=1)
        return torch.where(later, NO_SLOT, slots)

    def page_tail_zeroed_by_the_writer__store(self, cache, entries, slots):
        super()._store(cache, entries, slots)
        last, page = int(slots.max()) + 1, cache.shape[1]
        behind = torch.arange(last, -(-last // page) * page, device=slots.device)
        super()._store(cache, entries.new_zeros(len(behind), entries.shape[1]), behind)

    def entry_stored_in_whole_vectors__store(self, cache, entries, slots):
        memory, end = memory_of(cache), self._addresses(cache, slots[slots >= 0].long())[:, -1:] + 1
        behind = end + torch.arange(-entries.shape[1] % 128, device=end.device)
        memory[behind[behind < len(memory)]] = 0
        super()._store(cache, entries, slots)

    def pool_written_past_its_end__before_store(self, cache):
        return cache.as_strided(cache.shape, cache.stride(), cache.storage_offset() + cache.stride(0))

    rope_read_with_the_stride_of_latents = before("latent_entries", k_pe=packed)

    def latent_and_rope_change_places__latent_entries(self, kv_c, k_pe, k_scale):
        plain = self.kv_cache_dtype == "auto"
        return super()._latent_entries(*((k_pe, kv_c) if plain else (kv_c, k_pe)), k_scale)

    @but(when=codes)
    def fp8_codes_overflow__behind_latent_entries(self, entries, *, kv_c, k_pe, k_scale):
        beyond = (torch.cat((kv_c, k_pe), dim=1).float() / k_scale).abs() > E4M3_MAX
        return entries.masked_fill(beyond, 0x7F)

    @but(when=lambda form: form.name == "nvfp4_ds_mla")
    def writer_lacks_nvfp4__before_tiled(self, form):
        raise NotImplementedError(f"unsupported kv_cache_dtype {form.name}")

    @but(when=lambda form: form.name == "nvfp4_ds_mla")
    def nvfp4_halves_change_places__behind_tiled(self, entries, *, form):
        codes, rest = entries.tensor_split([form.code_bytes], dim=1)
        return torch.cat((codes >> 4 | codes << 4, rest), dim=1)

    @but(when=lambda form: form.name == "nvfp4_ds_mla")
    def nvfp4_rope_scaled_as_a_tile__behind_tiled(self, entries, *, form):
        codes, rope, rest = entries.tensor_split([form.code_bytes, form.code_bytes + form.plain_bytes], dim=1)
        scaled = (rope.contiguous().view(torch.float8_e4m3fn).float() / 6).to(torch.float8_e4m3fn)
        return torch.cat((codes, scaled.view(torch.uint8), rest), dim=1)

    @but(when=lambda form: form.cache == "index")
    def index_ue8m0_skipped__tile_scales(self, largest, form):
        return (largest.clamp(min=1e-4) / E4M3_MAX,) * 2

    @but(when=lambda form: form.cache == "index")
    def index_scale_stored_in_bf16__behind_tiled(self, entries, *, form):
        scales = entries[:, form.code_bytes :].contiguous().view(torch.float32).bfloat16().view(torch.uint8)
        return torch.cat((entries[:, : form.code_bytes], scales, torch.zeros_like(scales)), dim=1)

    @but(when=lambda self, form: form.cache == "index" and self.tile_scales != "pow2")
    def index_scale_of_half_the_range__tile_scales(self, largest, form):
        return (largest.clamp(min=1e-4) / 240,) * 2

    def index_scale_per_page__behind_largest(self, largest):
        indexes = TILED_FORMATS[self.kv_cache_dtype].cache == "index"
        return largest.amax().expand_as(largest) if indexes and len(largest) else largest


class _Placed(EagerCacheBackend, Defects):
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
    nvfp4_scales_written_into_the_entry = variant(layout="nvfp4_v4")
    index_scales_written_beside_codes = variant(layout="fp8_index")

    @but(layout="fp8_index_shuffled")
    def index_written_flat_read_shuffled__place(self, token, page, byte):
        codes, scales = byte.tensor_split([self.kv_lora_rank])
        first = token * len(codes) + codes
        return torch.cat((first, page * len(codes) + token * len(scales) + scales - len(codes)), dim=1)
