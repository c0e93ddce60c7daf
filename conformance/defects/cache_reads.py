"""Entries gathered from other places or read as something else; slots of tokens and of lists computed wrongly."""

import torch

from mla_conformance.backends.cache import NO_SLOT
from mla_conformance.backends.eager_cache import EagerCacheBackend, memory_of
from mla_conformance.defects.bases import clear, codes, mixed_entries, overwrite, packed, through_e8m0
from mla_conformance.defects.known import Defects, before, behind, but, variant
from mla_conformance.reference.entry_formats import TILED_FORMATS


class _Elsewhere(EagerCacheBackend, Defects, killed_by="latent_gather"):
    """Slots may be none of the cache's; then its first or its last is read."""

    def _gathered(self, cache, slots):
        return super()._gathered(cache, slots.clamp(0, cache.shape[0] * cache.shape[1] - 1))

    gather_starts_at_zero = before("slots_of_requests", seq_starts=torch.zeros_like)
    """Starts are ignored: every request is gathered from its first entry."""
    gather_takes_the_table_for_slots = before("slots_of_requests", page=1)
    """Pages are taken to hold one entry: the block table names slots."""
    gather_start_not_compressed = before("slots_of_requests", compress_ratio=1)
    """A start in tokens is taken for one in entries."""

    def gather_starts_at_a_page__before_slots_of_requests(self, seq_starts, *, page, compress_ratio):
        """A start inside of a page is taken for the page's first entry."""
        return seq_starts // (page * compress_ratio) * page * compress_ratio


class _LatentGatherCache(EagerCacheBackend, Defects, killed_by="latent_gather"):
    gather_ignores_the_page_stride = before("gathered", cache=packed)
    """A block is found by its own bytes, whatever the stride between blocks is."""
    gather_tile_scale_as_power_of_two = before(
        "meaning", lambda entries: through_e8m0(entries, torch.floor), when=mixed_entries
    )
    """Float32 scales of tiles are read as the power of two below."""
    gather_without_the_scale = before("meaning", k_scale=torch.ones_like)
    """Codes of an fp8 cache are widened as they are."""
    gather_clears_the_workspace = before("run_gather_latent", lambda workspace: clear(workspace.view(torch.uint8)))
    """Rows behind those that are gathered are filled with zeros."""

    @but("run_gather_latent")
    def gather_tail_skipped_by_the_ratio(
        self, kv_cache, workspace, block_table, cu_seq_lens, seq_starts, k_scale, compress_ratio=1
    ):
        """Rows of the workspace beyond its entries over the ratio are skipped."""
        before, room = workspace.clone(), len(workspace) // compress_ratio
        super().run_gather_latent(kv_cache, workspace, block_table, cu_seq_lens, seq_starts, k_scale, compress_ratio)
        workspace[room:] = before[room:]

    def gather_copies_the_last_page_whole__behind_run_gather_latent(self, _, *, kv_cache, workspace, cu_seq_lens):
        """The last page of the last request is copied with its tail, into rows that nobody asked for."""
        rows = int(cu_seq_lens[-1])
        workspace[rows : rows + kv_cache.shape[1]] = workspace[max(0, rows - 1) : rows]

    def gather_counts_requests_without_entries__slots(self, block_table, request, entry, page):
        """Behind a request without entries the block table of the wrong request is read."""
        present, place = request.unique(return_inverse=True)
        return super()._slots(block_table, place if len(present) else request, entry, page).clamp(min=0)

    def gather_rope_as_bf16__meaning(self, entries, k_scale, dtype):
        """The rotated part of an entry is read as bfloat16, whatever the model's dtype is."""
        form = TILED_FORMATS.get(self.kv_cache_dtype)
        known = torch.bfloat16 if form is not None and form.plain and not form.plain_codes else dtype
        return super()._meaning(entries, k_scale, known).to(dtype)

    @but(when=lambda self, dtype: codes(self) and dtype != torch.float32)
    def gather_scale_rounded_before__meaning(self, entries, k_scale, dtype):
        """Scales are rounded to the model's dtype before codes are multiplied with them."""
        return entries.to(dtype) * k_scale.to(dtype)


class _IndexGather(EagerCacheBackend, Defects, killed_by="index_gather"):
    layout, read_as = "", ""  # pages of the one are read as if they had the other

    def _gathered(self, cache, slots):
        if self.kv_cache_dtype != self.layout:
            return super()._gathered(cache, slots)
        return EagerCacheBackend(self.kv_lora_rank, 0, self.read_as, self.tile_scales, None)._gathered(cache, slots)

    index_gather_reads_scales_beside_codes = variant(layout="fp8_index", read_as="fp8_index_flat")
    """Scales of index keys are read behind their codes."""
    index_gather_reads_shuffled_as_flat = variant(layout="fp8_index_shuffled", read_as="fp8_index")
    """Codes of a shuffled page are read token after token."""
    index_gather_scale_of_the_page = behind("scales", lambda scales: scales[:1].expand_as(scales))
    """All keys of a request get the scale of the first key that is gathered."""

    def gather_truncates_addresses__gathered(self, cache, slots):
        """Addresses of entries are truncated to multiples of 16 bytes."""
        form, addresses = TILED_FORMATS.get(self.kv_cache_dtype), self._addresses(cache, slots)
        if form is not None and form.cache == "index":
            vectors = torch.arange(form.code_bytes, device=slots.device) // 16 * 16
            addresses[:, : form.code_bytes] -= addresses[:, vectors] % 16
        return memory_of(cache)[addresses].view(cache.dtype)

    @but("slots__run_slot_mapping", killed_by="slot_mapping")
    def slots_ratio_of_the_block(self, block_table, request, entry, page, *, compress_ratio):
        """The column of the block table is that of the token, as if a page held as many tokens as entries."""
        column = (entry * compress_ratio // page).clamp(max=block_table.shape[1] - 1)
        return block_table[request, column].long() * page + entry % page


class _SlotMapping(EagerCacheBackend, Defects, killed_by="slot_mapping"):
    slots_of_raw_tokens = before("run_slot_mapping", compress_ratio=1)
    """Every token gets a slot of its own, although an entry stands for several."""
    slots_interleave_ignored = before("run_slot_mapping", cp_kv_cache_interleave_size=1)
    """Entries are dealt out to ranks one by one, whatever their interleave is."""
    slots_padding_is_slot_0 = behind(
        "run_slot_mapping", lambda _, *, slot_mapping: overwrite(slot_mapping, slot_mapping.clamp(min=0))
    )
    """Tokens that write nothing get slot 0."""
    slots_in_int32 = behind("run_slot_mapping", lambda _, *, slot_mapping: overwrite(slot_mapping, slot_mapping.int()))
    """Block times page wraps in 32 bits."""

    def slots_written_by_the_first_token__before_run_slot_mapping(self, positions, *, compress_ratio):
        """The first token of an entry writes it, before the others are there."""
        place = positions % compress_ratio
        return positions if compress_ratio == 1 else positions + torch.where(place == 0, compress_ratio - 1, -place)

    @but("run_slot_mapping")
    def slots_padding_left_stale(self, slot_mapping, query_start_loc, *further, **world):
        """Slots behind the last counted token keep what an earlier batch left there."""
        before, counted = slot_mapping.clone(), int(query_start_loc[-1])
        super().run_slot_mapping(slot_mapping, query_start_loc, *further, **world)
        slot_mapping[counted:] = before[counted:]

    @but("behind_run_slot_mapping")
    def slots_of_all_ranks(
        self, _, *, slot_mapping, query_start_loc, positions, block_table, block_size, compress_ratio
    ):
        """A rank writes the entries of all ranks, as if its cache were replicated."""
        request = torch.arange(len(block_table)).to(positions.device).repeat_interleave(query_start_loc.diff())
        position = positions[: len(request)]
        slots = self._slots(block_table, request, position // compress_ratio, block_size)
        last = (position + 1) % compress_ratio == 0
        slot_mapping[: len(request)] = slots.where(last, NO_SLOT).to(slot_mapping.dtype)

    def slots_of_the_query_number__before_run_slot_mapping(self, positions, *, query_start_loc):
        """The position of a token is its number among the new ones, without its context."""
        first = query_start_loc[:-1].repeat_interleave(query_start_loc.diff())
        return torch.arange(int(query_start_loc[-1]), device=positions.device) - first


class _GlobalSlots(EagerCacheBackend, Defects, killed_by="global_slots"):
    list_page_of_64 = before("run_global_slots", block_size=64)
    """Pages are taken to hold 64 entries."""
    list_positions_passed_on = behind(
        "run_global_slots", lambda _, *, out, token_indices: overwrite(out, token_indices)
    )
    """Positions in a request are passed on as slots."""
    list_padding_becomes_slot_0 = behind("run_global_slots", lambda _, *, out: overwrite(out, out.clamp(min=0)))
    """What has no slot in a list becomes slot 0, which readers take for an entry."""

    def list_of_the_row_number__before_run_global_slots(self, req_id_per_token, *, out, block_table):
        """The number of a row is taken for that of its request."""
        return torch.arange(len(out), device=out.device).clamp(max=len(block_table) - 1).int()

    def list_beyond_the_table_clamped__before_run_global_slots(self, token_indices, *, block_table, block_size):
        """A position beyond the block table becomes a slot of its last column."""
        return token_indices.clamp(max=block_table.shape[1] * block_size - 1)

    def list_tail_of_columns_unfilled__run_global_slots(self, out, **further):
        """Of a list longer than a tile of 128 columns only whole tiles are filled."""
        before, whole = out.clone(), out.shape[1] // 128 * 128 or out.shape[1]
        super().run_global_slots(out, **further)
        out[:, whole:] = before[:, whole:]
