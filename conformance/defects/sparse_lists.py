"""Lists of selected keys that are read wrongly: padding, lengths, holes, order, numbers taken for others."""

from dataclasses import replace

import torch

from mla_conformance.backends import eager, eager_sparse, roles
from mla_conformance.defects import bases
from mla_conformance.defects.bases import ILLEGAL_ACCESS, chosen, gathered, joined, keyless, packed, places, slots_of
from mla_conformance.defects.known import Defects, before, behind, but, instead, together
from mla_conformance.reference import entry_formats, selected

_ON_ALL_RANKS, _ON_THIS_RANK = roles.IndexSpace.POSITION, roles.IndexSpace.RANK_LOCAL


def _packed(source):
    """A source whose blocks are found as if nothing stood between them."""
    return replace(source, cache=packed(source.cache))


def _once(listed, *, source):
    """What of lists counts, of keys that are named twice the first alone."""
    numbers = torch.where(listed, source.indices.long(), -2 - places(source.indices, 1))
    ordered, order = numbers.sort(dim=1, stable=True)
    again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return listed & ~torch.zeros_like(listed).scatter(1, order, again)


def _whole_at_0(source):
    """Lists whose length of 0 is taken for none."""
    length, columns = source.length, source.indices.shape[1]
    return source if length is None else replace(source, length=length.masked_fill(length == 0, columns))


def _lists_of(rows):
    """A step by which each row takes the list and the length of another."""

    def step(self, sources):
        metadata = self._sparse_metadata
        numbers = rows(metadata.query_start_loc.long(), metadata.req_id_per_token.long())
        return [each.rows(numbers) for each in sources]

    return step


def _first_tokens_too(self, listed, *, source, request):
    counted = places(source.indices, 1) < self._sparse_metadata.seq_lens[request].unsqueeze(1)
    return listed | counted if source.length is None else listed


def _counting(space, other):
    """Lists that count in one space, taken for some that count in another."""
    return lambda sources: [replace(each, space=other) if each.space is space else each for each in sources]


class _Lists(eager_sparse.EagerSparseBackend, Defects):
    sparse_keyless_lse_of_plus_inf = behind("attend", lse=lambda lse: lse.masked_fill(lse == -torch.inf, torch.inf))
    sparse_keyless_row_not_written = behind("attend", bases.nan_without_keys)
    sparse_valid_entries_read_from_the_front = behind("listed", lambda x: x & (places(x, 1) < x.sum(1, keepdim=True)))

    def sparse_tiles_behind_an_empty_one_skipped__behind_listed(self, listed):
        tiles = torch.nn.functional.pad(listed, (0, -listed.shape[1] % 64)).unflatten(1, (-1, 64)).any(dim=2)
        reached = tiles.int().cummin(dim=1).values.bool()
        return listed & reached.repeat_interleave(64, dim=1)[:, : listed.shape[1]]

    @but(key_tile=32)
    def sparse_leading_masked_tile_nan_poisons_row__behind_accumulate(self, later):
        return later._replace(weighted=later.weighted.masked_fill(later.maximum == -torch.inf, torch.nan))

    def sparse_keyless_row_beside_a_sink_nan__behind_with_sink(self, shared, *, lse, sink):
        return shared if sink is None else shared.masked_fill(keyless(lse), torch.nan)

    sparse_list_of_the_first_row = before("attend", _lists_of(lambda starts, request: torch.zeros_like(request)))
    sparse_list_of_the_request = before("attend", _lists_of(lambda starts, request: starts[request]))
    sparse_list_at_the_number_of_the_request = before("attend", _lists_of(lambda starts, request: request))
    sparse_empty_lanes_load_entry_0 = before("keys", visible=torch.ones_like)
    sparse_heads_beyond_64_are_the_first = before("attend", lambda self, q: q[:, places(q, 1) % 64])
    sparse_padding_taken_for_key_0 = together(
        before("listed", lambda source: replace(source, indices=source.indices.clamp(min=0))),
        behind("slots", lambda slots: slots.clamp(min=0)),
    )
    sparse_padding_taken_for_the_entry_before_the_pool = together(
        behind("listed___attend", _first_tokens_too),
        behind("slots", lambda slots, *, source: slots % slots_of(source.cache)),
    )

    def sparse_causal_bound_on_slots__listed___attend(self, source, *, request):
        return super()._listed(source) & (source.indices < self._sparse_metadata.seq_lens[request].unsqueeze(1))

    def sparse_neighbours_attend_to_their_union__before_attend(self, sources, *, q):
        pair, both = (places(q) ^ 1).clamp(max=len(q) - 1), []
        for source in sources:
            own = source.indices.masked_fill(~self._listed(source), -1)
            theirs = own[pair].masked_fill((own[pair].unsqueeze(2) == own.unsqueeze(1)).any(dim=2), -1)
            both.append(replace(source, indices=torch.cat((own, theirs), dim=1), length=None))
        return both

    def sparse_tile_of_16_heads_overwrites_the_next_row__behind_attend(self, output, lse):
        output[1:, : -self.num_heads % 16] = 0.0

    sparse_dcp_global_index_taken_for_local = before("_attend", sources=_counting(_ON_ALL_RANKS, _ON_THIS_RANK))
    sparse_dcp_keys_of_others_counted = behind("held", lambda held: torch.ones_like(held))
    sparse_dcp_local_index_divided_again = before("_attend", sources=_counting(_ON_THIS_RANK, _ON_ALL_RANKS))
    sparse_dcp_interleave_of_one = before(
        "prepare_metadata", lambda sparse_metadata: replace(sparse_metadata, cp_kv_cache_interleave_size=1)
    )

    def sparse_dcp_empty_rank_lse_of_plus_inf__behind_attend(self, output, lse):
        return output, lse.masked_fill((lse == -torch.inf) & (self._sparse_metadata.dcp_world_size > 1), torch.inf)

    sparse_topk_length_not_passed = instead("listed", lambda self, source: source.indices != selected.NO_KEY)
    sparse_length_of_0_is_none = before("listed", source=_whole_at_0)
    sparse_key_named_twice_counted_once = behind("listed", _once)

    def sparse_prefill_lanes_beyond_topk_length__listed__attend(self, source, *, q):
        return super()._listed(source) if len(q) <= 64 else source.indices != selected.NO_KEY

    def nan_topk_indices_propagate_to_ima__behind_slots(self, slots, *, source):
        if bool((source.indices >= slots_of(source.cache)).any()):
            raise RuntimeError(ILLEGAL_ACCESS)

    def sparse_length_of_the_request__listed___attend(self, source, *, request):
        length = source.length if source.length is None else source.length[request.clamp(max=len(source.length) - 1)]
        return super()._listed(replace(source, length=length))

    def sparse_empty_rows_behind_64_not_written__behind_attend(self, output, lse, *, q):
        return output.masked_fill(keyless(lse) & (places(q) >= 64).view(-1, 1, 1), torch.nan), lse

    def sparse_entry_before_is_loaded_too__keys(self, source, slots, visible, k_scale):
        paired = visible & (slots % source.cache.shape[1] > 0)
        beside = super()._keys(source, (slots - 1).clamp(min=0), paired, k_scale)
        return super()._keys(source, slots, visible, k_scale) + 0.0 * beside

    def sparse_missing_instance_of_16_heads_and_512__before_attend(self, sources):
        if not sources[0].paged and self.num_heads == 16 and sources[0].indices.shape[1] == 512:
            raise RuntimeError("Unsupported sparse-MLA prefill configuration: num_heads=16 topk=512")

    sparse_rows_in_blocks_of_64_lose_the_last = behind(
        "attend", lambda output, lse, *, q: bases.fill(output[max(64, len(q) // 64 * 64) :])
    )
    sparse_last_tile_of_packed_rows_lost = behind("attend", bases.last_packed_tile_lost)
    sparse_slot_in_fifteen_bits = behind("slots", lambda slots, *, source: slots & 0x7FFF if source.paged else slots)
    sparse_last_tile_of_a_list_dropped = instead(
        "tiles", lambda self, keys: (tile for tile in super()._tiles(keys) if tile.stop - tile.start == 64), key_tile=64
    )

    @but(key_tile=64)
    def sparse_tile_without_keys_weighs_as_a_logit_of_0__behind_accumulate(self, later, *, state, scores):
        behind = (scores == -torch.inf).all(dim=-1, keepdim=True) & (state.total > 0)
        zero, one = torch.zeros_like(later.total), torch.ones_like(later.total)
        return chosen(behind, joined(later, eager.SoftmaxState(zero, one, torch.zeros_like(later.weighted))), later)

    def sparse_list_rows_advance_by_a_power_of_two__before_attend(self, sources):
        misread = []
        for source in sources:
            rows, columns = source.indices.shape
            compiled = 1 << (columns - 1).bit_length()
            padding = (0, rows * (compiled - columns))
            padded = torch.nn.functional.pad(source.indices.flatten(), padding, value=selected.NO_KEY)
            misread.append(replace(source, indices=padded.view(rows, compiled)[:, :columns]))
        return misread

    def sparse_topk_without_an_instance__before_attend(self, *, sources):
        columns = sources[0].indices.shape[1]
        if columns % 64 == 0 and columns & (columns - 1):
            raise RuntimeError("expected more than 64 query tokens; a decode has a kernel of its own")

    def sparse_entries_without_rope_refused__before_attend(self, sources):
        if not self.qk_rope_head_dim and any(source.length is None for source in sources):
            raise ValueError("Native qk_rope_head_dim=0 MLA requires sparse_mla_top_k_lens")

    sparse_assumes_packed_pages = before(
        "entries", source=_packed, when=lambda source: source.paged and source.layout not in entry_formats.TILED_FORMATS
    )
    sparse_position_taken_for_slot = before("slots", lambda source: replace(source, space=roles.IndexSpace.SLOT))
    sparse_workspace_start_forgotten = before("slots", request=torch.zeros_like, when=gathered)

    def sparse_table_row_of_the_token__before__attend(self, request):
        return places(request).clamp(max=len(self._sparse_metadata.seq_lens) - 1)

    @but(when=lambda self, source: source.space is not roles.IndexSpace.SLOT and not gathered(self))
    def sparse_table_of_pages_of_64__behind_slots(self, slots, *, source, request):
        position, table = source.indices.long(), self._sparse_metadata.block_table.long()
        columns = (position // 64).clamp(0, table.shape[1] - 1)
        return table[request.unsqueeze(1), columns] * source.cache.shape[1] + position % 64 % source.cache.shape[1]

    def sparse_gathered_start_of_request_in_six_bits__before_slots(self, request, *, source):
        return request if source.paged else request % 64
