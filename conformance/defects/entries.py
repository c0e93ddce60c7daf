"""Entries that are written, gathered or compressed wrongly; slots of tokens and of lists, states, rotations."""

import torch

from mla_conformance.backends.cache import NO_SLOT
from mla_conformance.backends.eager_cache import EagerCacheBackend, memory_of
from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.backends.slots import slots_at
from mla_conformance.defects import bases
from mla_conformance.defects.bases import codes, fill, in_layout, kept, mixed_entries, packed, slots_of, write
from mla_conformance.defects.known import Defects, before, behind, but, instead, together, variant
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.quantization import E4M3_MAX


def _float32(form):
    return form.scales == "float32" and form.cache != "index"


def _with_a_floor(whole):
    """Scales of at least 1e-4, of those that are powers of two the ``whole`` exponent."""

    def scales(self, largest, form):
        least = (largest / E4M3_MAX).clamp(min=1e-4)
        return (whole(least.log2()).exp2() if self.tile_scales == "pow2" else least,) * 2

    return scales


class _Writes(EagerCacheBackend, Defects):
    zero_tile_divides_by_zero = instead("tile_scales", lambda largest, form: (largest / E4M3_MAX,) * 2, when=_float32)
    tile_scale_has_a_floor = instead("tile_scales", _with_a_floor(torch.ceil), when=_float32)
    tile_scale_of_two_rounded_down = instead("tile_scales", _with_a_floor(torch.floor), when=_float32)
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
        return torch.where((page.unsqueeze(1) == page).triu(1).any(dim=1), NO_SLOT, slots)

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
        parts = (k_pe, kv_c) if self.kv_cache_dtype == "auto" else (kv_c, k_pe)
        return super()._latent_entries(*parts, k_scale)

    @but(when=codes)
    def fp8_codes_overflow__behind_latent_entries(self, entries, *, kv_c, k_pe, k_scale):
        return entries.masked_fill((torch.cat((kv_c, k_pe), dim=1).float() / k_scale).abs() > E4M3_MAX, 0x7F)

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


class _Elsewhere(EagerCacheBackend, Defects):
    """Slots may be none of the cache's; then its first or its last is read."""

    def _gathered(self, cache, slots):
        return super()._gathered(cache, slots.clamp(0, slots_of(cache) - 1))

    gather_starts_at_zero = before("slots_of_requests", seq_starts=torch.zeros_like)
    gather_takes_the_table_for_slots = before("slots_of_requests", page=1)
    gather_start_not_compressed = before("slots_of_requests", compress_ratio=1)

    def gather_starts_at_a_page__before_slots_of_requests(self, seq_starts, *, page, compress_ratio):
        return seq_starts // (page * compress_ratio) * page * compress_ratio


def _as(layout):
    """A gather by which pages are read as if they had another layout."""

    def gathered(self, cache, slots):
        return EagerCacheBackend(self.kv_lora_rank, 0, layout, self.tile_scales, None)._gathered(cache, slots)

    return gathered


class _Reads(EagerCacheBackend, Defects):
    gather_ignores_the_page_stride = before("gathered", cache=packed)
    gather_tile_scale_as_power_of_two = before(
        "meaning", lambda entries: bases.through_e8m0(entries, torch.floor), when=mixed_entries
    )
    gather_without_the_scale = before("meaning", k_scale=torch.ones_like)
    gather_clears_the_workspace = before("run_gather_latent", lambda workspace: fill(workspace.view(torch.uint8)))

    def gather_tail_skipped_by_the_ratio__run_gather_latent(self, *given, workspace, compress_ratio=1, **named):
        before, room = workspace.clone(), len(workspace) // compress_ratio
        super().run_gather_latent(*given, workspace=workspace, compress_ratio=compress_ratio, **named)
        workspace[room:] = before[room:]

    def gather_copies_the_last_page_whole__behind_run_gather_latent(self, _, *, kv_cache, workspace, cu_seq_lens):
        rows = int(cu_seq_lens[-1])
        workspace[rows : rows + kv_cache.shape[1]] = workspace[max(0, rows - 1) : rows]

    def gather_counts_requests_without_entries__slots(self, block_table, request, entry, page):
        present, place = request.unique(return_inverse=True)
        return super()._slots(block_table, place if len(present) else request, entry, page).clamp(min=0)

    def gather_rope_as_bf16__meaning(self, entries, k_scale, dtype):
        form = TILED_FORMATS.get(self.kv_cache_dtype)
        known = torch.bfloat16 if form is not None and form.plain and not form.plain_codes else dtype
        return super()._meaning(entries, k_scale, known).to(dtype)

    @but(when=lambda self, dtype: codes(self) and dtype != torch.float32)
    def gather_scale_rounded_before__meaning(self, entries, k_scale, dtype):
        return entries.to(dtype) * k_scale.to(dtype)

    index_gather_reads_scales_beside_codes = instead("gathered", _as("fp8_index_flat"), when=in_layout("fp8_index"))
    index_gather_reads_shuffled_as_flat = instead("gathered", _as("fp8_index"), when=in_layout("fp8_index_shuffled"))
    index_gather_scale_of_the_page = behind("scales", lambda scales: scales[:1].expand_as(scales))

    def gather_truncates_addresses__gathered(self, cache, slots):
        form, addresses = TILED_FORMATS.get(self.kv_cache_dtype), self._addresses(cache, slots)
        if form is not None and form.cache == "index":
            vectors = torch.arange(form.code_bytes, device=slots.device) // 16 * 16
            addresses[:, : form.code_bytes] -= addresses[:, vectors] % 16
        return memory_of(cache)[addresses].view(cache.dtype)

    @but("slots__run_slot_mapping")
    def slots_ratio_of_the_block(self, block_table, request, entry, page, *, compress_ratio):
        column = (entry * compress_ratio // page).clamp(max=block_table.shape[1] - 1)
        return block_table[request, column].long() * page + entry % page

    slots_of_raw_tokens = before("run_slot_mapping", compress_ratio=1)
    slots_interleave_ignored = before("run_slot_mapping", cp_kv_cache_interleave_size=1)
    slots_padding_is_slot_0 = behind(
        "run_slot_mapping", lambda _, *, slot_mapping: write(slot_mapping, slot_mapping.clamp(min=0))
    )
    slots_in_int32 = behind("run_slot_mapping", lambda _, *, slot_mapping: write(slot_mapping, slot_mapping.int()))

    def slots_written_by_the_first_token__before_run_slot_mapping(self, positions, *, compress_ratio):
        place = positions % compress_ratio
        return positions if compress_ratio == 1 else positions + torch.where(place == 0, compress_ratio - 1, -place)

    @but("run_slot_mapping")
    def slots_padding_left_stale(self, slot_mapping, query_start_loc, *further, **world):
        before, counted = slot_mapping.clone(), int(query_start_loc[-1])
        super().run_slot_mapping(slot_mapping, query_start_loc, *further, **world)
        slot_mapping[counted:] = before[counted:]

    @but("behind_run_slot_mapping")
    def slots_of_all_ranks(
        self, _, *, slot_mapping, query_start_loc, positions, block_table, block_size, compress_ratio
    ):
        request = torch.arange(len(block_table)).to(positions.device).repeat_interleave(query_start_loc.diff())
        position = positions[: len(request)]
        slots = self._slots(block_table, request, position // compress_ratio, block_size)
        last = (position + 1) % compress_ratio == 0
        slot_mapping[: len(request)] = slots.where(last, NO_SLOT).to(slot_mapping.dtype)

    def slots_of_the_query_number__before_run_slot_mapping(self, positions, *, query_start_loc):
        first = query_start_loc[:-1].repeat_interleave(query_start_loc.diff())
        return torch.arange(int(query_start_loc[-1]), device=positions.device) - first

    list_page_of_64 = before("run_global_slots", block_size=64)
    list_positions_passed_on = behind("run_global_slots", lambda _, *, out, token_indices: write(out, token_indices))
    list_padding_becomes_slot_0 = behind("run_global_slots", lambda _, *, out: write(out, out.clamp(min=0)))

    def list_of_the_row_number__before_run_global_slots(self, req_id_per_token, *, out, block_table):
        return torch.arange(len(out), device=out.device).clamp(max=len(block_table) - 1).int()

    def list_beyond_the_table_clamped__before_run_global_slots(self, token_indices, *, block_table, block_size):
        return token_indices.clamp(max=block_table.shape[1] * block_size - 1)

    def list_tail_of_columns_unfilled__run_global_slots(self, out, **further):
        before, whole = out.clone(), out.shape[1] // 128 * 128 or out.shape[1]
        super().run_global_slots(out, **further)
        out[:, whole:] = before[:, whole:]


def _ends_of(self, positions):
    """[T] bool, tokens whose entries are written if a group ends before these positions."""
    ends = (positions > 0) & (positions % self.compression.ratio == 0)
    return (self._compress_metadata.state_slot_mapping >= 0) & ends


class _OtherEnds(EagerCompressBackend, Defects):
    """Entries are written where other tokens than the last of a group stand."""

    compress_written_a_token_early = instead("ends", lambda self: _ends_of(self, self._compress_metadata.positions + 2))
    compress_written_a_token_late = together(
        instead("ends", lambda self: _ends_of(self, self._compress_metadata.positions)),
        behind("window", lambda window: window - 1),
        behind("numbers", lambda numbers: numbers - 1),
        before("angles", lambda ends: ends - 1),
    )

    def _slots(self, page):
        metadata = self._compress_metadata
        slots = slots_at(metadata.block_table, metadata.req_id_per_token.long(), self._numbers(), page)
        return slots.where(self._ends() & (slots >= 0), -1)

    def _numbers(self):
        """[T] entries that tokens belong to."""
        return self._compress_metadata.positions // self.compression.ratio

    def compress_table_of_the_manager__numbers__slots(self, *, page):
        positions = self._compress_metadata.positions
        return positions // page * page + positions // self.compression.ratio % page


class _Compress(EagerCompressBackend, Defects):
    compress_lengths_not_handed_over = behind("missing", lambda missing: torch.ones_like(missing))
    compress_state_not_cleared = behind("missing", lambda missing: torch.zeros_like(missing))

    def compress_overlap_halves_swapped__before_halves(self, x):
        return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) if self.compression.overlap else x

    compress_nobody_is_weighted = behind("gathered", lambda k, x: (k, x.masked_fill(x == -torch.inf, 0.0)))

    def compress_norm_without_epsilon__normed(self, entries, weight):
        return entries * entries.square().mean(dim=-1, keepdim=True).rsqrt() * weight

    compress_pools_overlap = before("store", cache=packed)
    compress_rotated_by_the_last_position = instead("angles", lambda self, ends: ends)
    compress_never_rotated = instead("rotated", lambda self, entries, turns: entries)
    compress_softmax_without_maximum = instead("pooled", lambda self, k, x: (x.exp() * k).sum(1) / x.exp().sum(1))

    def compress_maximum_from_zero__pooled(self, k, logits):
        weights = (logits - logits.amax(dim=1, keepdim=True).clamp(min=0.0)).exp()
        return ((weights * k).sum(dim=1) / weights.sum(dim=1)).nan_to_num(0.0)

    def compress_states_in_16_bits__before_store(self, rows, *, cache):
        return rows.bfloat16().float() if cache.dtype == torch.float32 else rows

    compress_padding_written = behind("state_slots__run_compress", lambda x, *, state_cache: x % slots_of(state_cache))

    def compress_length_3_modulo_4__behind_state_slots(self, slots):
        metadata = self._compress_metadata
        lost = metadata.query_start_loc[1:].long()[(metadata.seq_lens + 1) % self.compression.ratio == 0] - 1
        return slots.index_fill(0, lost, -1)

    @property
    def _begun(self):
        """[T] the first position of the call that a token is of."""
        metadata = self._compress_metadata
        return (metadata.seq_lens.long() - metadata.query_start_loc.long().diff())[metadata.req_id_per_token.long()]

    compress_begins_with_every_call = instead("missing", lambda self, x: x < self._begun[self._ends().nonzero()])

    def compress_places_from_the_start_of_a_call__before_places(self, positions):
        return (positions - self._begun).clamp(min=0)

    def compress_table_of_an_earlier_call__state_blocks(self, requests, columns):
        table = kept(self, "table", self._compress_metadata.state_block_table)
        usual, known = super()._state_blocks(requests, columns), (requests < len(table)) & (columns < table.shape[1])
        found = table.long()[requests.clamp(max=len(table) - 1), columns.clamp(max=table.shape[1] - 1)]
        return torch.where(known & (found >= 0) & (found <= usual.max()), found, usual)
