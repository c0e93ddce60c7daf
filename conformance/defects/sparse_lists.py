"""Lists of selected keys that are read wrongly: padding, lengths, holes, order, numbers taken for others."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager import SoftmaxState
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.defects.bases import joined, keyless, nan_without_keys, slots_of
from mla_conformance.defects.known import Defects, before, behind, but, instead, together
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.selected import NO_KEY

_ON_ALL_RANKS, _ON_THIS_RANK = IndexSpace.POSITION, IndexSpace.RANK_LOCAL
_SHAPES_TOO = ("model_shapes",)  # it comes before, and has lists of every kind


def _columns(indices):
    return torch.arange(indices.shape[1], device=indices.device)


def _strided(source, stride):
    """A source whose blocks are found as if so many bytes or values stood between them."""
    shape, start = source.cache.shape, source.cache.storage_offset()
    return replace(source, cache=source.cache.as_strided(shape, (stride, shape[2], 1), start))


def _once(listed, source):
    """What of lists counts, of keys that are named twice the first alone."""
    numbers = torch.where(listed, source.indices.long(), -2 - _columns(source.indices))
    ordered, order = numbers.sort(dim=1, stable=True)
    again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return listed & ~torch.zeros_like(listed).scatter(1, order, again)


def _whole_at_0(source):
    """Lists whose length of 0 is taken for none."""
    if source.length is None:
        return source
    whole = torch.full_like(source.length, source.indices.shape[1])
    return replace(source, length=torch.where(source.length == 0, whole, source.length))


class _SelectionPadding(EagerSparseBackend, Defects, killed_by="selection_padding", related=("sparse_lse",)):
    sparse_keyless_lse_of_plus_inf = behind("attend", lse=lambda lse: lse.masked_fill(lse == -torch.inf, torch.inf))
    """The LSE of a row whose list names nothing is +inf."""
    sparse_keyless_row_not_written = behind("attend", nan_without_keys)
    """A row whose list names nothing is skipped, and holds what the buffer held."""
    sparse_valid_entries_read_from_the_front = behind(
        "listed", lambda listed, *, source: listed & (_columns(source.indices) < listed.sum(dim=1, keepdim=True))
    )
    """The entries that name a key are counted, and so many columns are read from the front, whatever stands there."""

    def sparse_tiles_behind_an_empty_one_skipped__behind_listed(self, listed):
        """A list ends with the first tile of 64 entries that names no key."""
        tiles = torch.nn.functional.pad(listed, (0, -listed.shape[1] % 64)).unflatten(1, (-1, 64)).any(dim=2)
        reached = tiles.int().cummin(dim=1).values.bool()
        return listed & reached.repeat_interleave(64, dim=1)[:, : listed.shape[1]]

    @but(key_tile=32)
    class sparse_leading_masked_tile_nan_poisons_row:
        """A first tile without a key leaves -inf less -inf in all that follows."""

        def _accumulate(self, state, scores, v):
            later = super()._accumulate(state, scores, v)
            poisoned = (state.maximum == -torch.inf) & (later.maximum > -torch.inf) & (self._seen > 0)
            self._seen += 1
            return later._replace(weighted=later.weighted.masked_fill(poisoned, torch.nan))

        def _initial(self, q, v):
            self._seen = 0
            return super()._initial(q, v)

    @but(related=())
    def sparse_keyless_row_beside_a_sink_nan__behind_with_sink(self, shared, *, lse, sink):
        """The share of a row without keys beside a sink is 0 / 0."""
        return shared if sink is None else shared.masked_fill(keyless(lse), torch.nan)


class _OtherLists(EagerSparseBackend, Defects, killed_by="sparse_decode", related=_SHAPES_TOO):
    """Each row takes the list and the length of another."""

    def attend(self, q, sources, k_scale, sink):
        metadata = self._sparse_metadata
        rows = self._rows(metadata.query_start_loc.long(), metadata.req_id_per_token.long())
        return super().attend(q, [each.rows(rows) for each in sources], k_scale, sink)

    sparse_list_of_the_first_row = instead("rows", lambda self, starts, request: torch.zeros_like(request))
    """The list of the first row is that of the whole call."""
    sparse_list_of_the_request = instead("rows", lambda self, starts, request: starts[request])
    """The query tokens of a request share the list of its first."""
    sparse_list_at_the_number_of_the_request = instead("rows", lambda self, starts, request: request)
    """Lists are taken for one of each request, and read at its number."""


def _first_tokens_too(self, listed, *, source, request):
    counted = _columns(source.indices) < self._sparse_metadata.seq_lens[request].unsqueeze(1)
    return listed | counted if source.length is None else listed


class _SparseDecode(EagerSparseBackend, Defects, killed_by="sparse_decode", related=_SHAPES_TOO):
    sparse_empty_lanes_load_entry_0 = before("keys", visible=torch.ones_like)
    """Lanes without a key load entry 0, and their weight of 0 times NaN is NaN."""
    sparse_heads_beyond_64_are_the_first = before("attend", lambda self, q: q[:, torch.arange(self.num_heads) % 64])
    """Heads beyond 64 get the queries of the first 64."""
    sparse_padding_taken_for_key_0 = together(
        before("listed", lambda source: replace(source, indices=source.indices.clamp(min=0))),
        behind("slots", lambda slots: slots.clamp(min=0)),
    )
    """-1 is clamped to 0, and the entry there counts as often as a list is padded."""
    sparse_padding_taken_for_the_entry_before_the_pool = together(
        behind("listed___attend", _first_tokens_too),
        behind("slots", lambda slots, *, source: slots % slots_of(source.cache)),
    )
    """As many entries as there are tokens are dereferenced, and -1 is the entry before the first: here the last."""

    def sparse_causal_bound_on_slots__listed___attend(self, source, *, request):
        """A causal mask is laid over the numbers of a list, as if they were positions of the row's own sequence."""
        return super()._listed(source) & (source.indices < self._sparse_metadata.seq_lens[request].unsqueeze(1))

    def sparse_neighbours_attend_to_their_union__before_attend(self, sources, *, q):
        """Two rows share a gathered set of keys, and each attends to all of it."""
        pair, both = (torch.arange(len(q)) ^ 1).clamp(max=len(q) - 1), []
        for source in sources:
            own = source.indices.masked_fill(~self._listed(source), -1)
            theirs = own[pair].masked_fill((own[pair].unsqueeze(2) == own.unsqueeze(1)).any(dim=2), -1)
            both.append(replace(source, indices=torch.cat((own, theirs), dim=1), length=None))
        return both

    def sparse_tile_of_16_heads_overwrites_the_next_row__behind_attend(self, output, lse):
        """Stores of 16 heads overwrite the next row where there are fewer."""
        output[1:, : -self.num_heads % 16] = 0.0


def _counting(space, other):
    """Lists that count in one space, taken for some that count in another."""
    return lambda sources: [replace(each, space=other) if each.space is space else each for each in sources]


class _SparseDcp(EagerSparseBackend, Defects, killed_by="sparse_dcp"):
    sparse_dcp_global_index_taken_for_local = before("_attend", sources=_counting(_ON_ALL_RANKS, _ON_THIS_RANK))
    """Positions on all ranks are taken for tokens of this rank, and looked up in its table."""
    sparse_dcp_keys_of_others_counted = behind("held", lambda held: torch.ones_like(held))
    """Positions that another rank holds are not left out, and read what this rank holds at the same place."""
    sparse_dcp_local_index_divided_again = before("_attend", sources=_counting(_ON_THIS_RANK, _ON_ALL_RANKS))
    """Lists that a rank has already filtered to its own tokens are taken for positions on all ranks."""

    def sparse_dcp_interleave_of_one__before_prepare_metadata(self, sparse_metadata):
        """Tokens are dealt out to ranks one by one, whatever the interleave is."""
        return replace(sparse_metadata, cp_kv_cache_interleave_size=1)

    def sparse_dcp_empty_rank_lse_of_plus_inf__behind_attend(self, output, lse):
        """A rank that holds none of a row's keys returns +inf as its LSE, and takes all of the weight."""
        return output, lse.masked_fill((lse == -torch.inf) & (self._sparse_metadata.dcp_world_size > 1), torch.inf)


class _SelectionLength(EagerSparseBackend, Defects, killed_by="selection_length"):
    sparse_topk_length_not_passed = instead("listed", lambda self, source: source.indices != NO_KEY)
    """The lengths of the lists are not handed to the kernel, and what stands behind them counts."""
    sparse_length_of_0_is_none = before("listed", source=_whole_at_0)
    """A length of 0 is taken for none, and the whole list counts."""
    sparse_key_named_twice_counted_once = behind(
        "listed", lambda listed, *, source: _once(listed, source), killed_by="selection_order"
    )
    """Keys that a list names twice count once."""

    def sparse_prefill_lanes_beyond_topk_length__listed__attend(self, source, *, q):
        """The kernel for more than 64 query tokens does not bound its lanes by the lengths of the lists."""
        return super()._listed(source) if len(q) <= 64 else source.indices != NO_KEY

    def nan_topk_indices_propagate_to_ima__behind_slots(self, slots, *, source):
        """Whatever a list holds is an address unless it is negative, uninitialised entries behind its length as
        well."""
        if bool((source.indices >= slots_of(source.cache)).any()):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def sparse_length_of_the_request__listed___attend(self, source, *, request):
        """The lengths are taken for one of each request, and read at its number."""
        length = source.length if source.length is None else source.length[request.clamp(max=len(source.length) - 1)]
        return super()._listed(replace(source, length=length))

    def sparse_empty_rows_behind_64_not_written__behind_attend(self, output, lse, *, q):
        """From the second block of 64 rows on, a row whose list names nothing holds what the buffer held."""
        late = torch.arange(len(q), device=q.device).unsqueeze(1) >= 64
        return output.masked_fill((late & (lse == -torch.inf).mT).unsqueeze(-1), torch.nan), lse

    @but(killed_by="unselected_keys")
    def sparse_entry_before_is_loaded_too__keys(self, source, slots, visible, k_scale):
        """A load fetches the entry before in the page as well, whose weight of 0 does not silence NaN."""
        paired = visible & (slots % source.cache.shape[1] > 0)
        beside = super()._keys(source, (slots - 1).clamp(min=0), paired, k_scale)
        return super()._keys(source, slots, visible, k_scale) + 0.0 * beside

    @but(killed_by="sparse_prefill")
    def sparse_missing_instance_of_16_heads_and_512__before_attend(self, sources):
        """A prefill of 16 heads over lists of 512 has no instance."""
        if not sources[0].paged and self.num_heads == 16 and sources[0].indices.shape[1] == 512:
            raise RuntimeError("Unsupported sparse-MLA prefill configuration: num_heads=16 topk=512")

    @but(killed_by="sparse_prefill", related=_SHAPES_TOO)
    def sparse_rows_in_blocks_of_64_lose_the_last__behind_attend(self, output, lse, *, q):
        """Beyond 64 rows a launch has whole blocks of 64, and the rows of the last, partial one stay 0."""
        if len(q) > 64:
            output[len(q) // 64 * 64 :] = 0.0

    @but(killed_by="model_shapes")
    def sparse_last_tile_of_packed_rows_lost__behind_attend(self, output, lse, *, q):
        """Several rows and their heads are packed into tiles of 64; behind the first a partial one is lost."""
        rows = len(q) * self.num_heads
        if len(q) > 1 and rows > 64:
            output.flatten(0, 1)[rows // 64 * 64 :] = 0.0


class _SparseDecodeAlone(EagerSparseBackend, Defects, killed_by="sparse_decode"):
    sparse_slot_in_fifteen_bits = behind("slots", lambda slots, *, source: slots & 0x7FFF if source.paged else slots)
    """A slot is a signed number of two bytes, too few for many large pages."""
    sparse_last_tile_of_a_list_dropped = instead(
        "tiles", lambda self, keys: (tile for tile in super()._tiles(keys) if tile.stop - tile.start == 64), key_tile=64
    )
    """Columns behind the last whole tile of 64 are ignored."""

    @but(key_tile=64)
    def sparse_tile_without_keys_weighs_as_a_logit_of_0__behind_accumulate(self, later, *, state, scores):
        """A later tile of 64 columns in which a list names no key adds a weight of exp(0) to the row's sum."""
        behind = (scores == -torch.inf).all(dim=-1, keepdim=True) & (state.total > 0)
        zero, one = torch.zeros_like(later.total), torch.ones_like(later.total)
        weighed = joined(later, SoftmaxState(zero, one, torch.zeros_like(later.weighted)))
        return SoftmaxState(*(torch.where(behind, a, b) for a, b in zip(weighed, later, strict=True)))

    def sparse_list_rows_advance_by_a_power_of_two__before_attend(self, sources):
        """The row of a list is found by the columns that a kernel is compiled for, which are a power of two."""
        misread = []
        for source in sources:
            rows, columns = source.indices.shape
            compiled = 1 << (columns - 1).bit_length()
            padding = (0, rows * (compiled - columns))
            padded = torch.nn.functional.pad(source.indices.flatten(), padding, value=NO_KEY)
            misread.append(replace(source, indices=padded.view(rows, compiled)[:, :columns]))
        return misread

    def sparse_topk_without_an_instance__before_attend(self, *, sources):
        """Numbers of whole tiles that are no power of two have no instance, and fall through to a kernel that
        refuses."""
        columns = sources[0].indices.shape[1]
        if columns % 64 == 0 and columns & (columns - 1):
            raise RuntimeError("expected more than 64 query tokens; a decode has a kernel of its own")

    def sparse_entries_without_rope_refused__before_attend(self, sources):
        """Keys without rotated columns are refused unless lengths of lists come with them."""
        if not self.qk_rope_head_dim and any(source.length is None for source in sources):
            raise ValueError("Native qk_rope_head_dim=0 MLA requires sparse_mla_top_k_lens")

    def sparse_assumes_packed_pages__before_entries(self, source):
        """A slot is an offset into one row of entries, whatever the stride between blocks is."""
        taken = source.paged and source.layout not in TILED_FORMATS
        return _strided(source, source.cache.shape[1] * source.cache.shape[2]) if taken else source


class _IndexSpaces(EagerSparseBackend, Defects, killed_by="index_spaces"):
    sparse_position_taken_for_slot = before("slots", lambda source: replace(source, space=IndexSpace.SLOT))
    """Positions are taken for slots."""

    def sparse_workspace_start_forgotten__before_slots(self, request):
        """Positions count from the first gathered key, not from that at which the request begins."""
        return torch.zeros_like(request) if self._sparse_metadata.block_table is None else request

    def sparse_table_row_of_the_token__before__attend(self, request):
        """The table has a row for each request and is read at the number of the query token."""
        return torch.arange(len(request), device=request.device).clamp(max=len(self._sparse_metadata.seq_lens) - 1)

    @but(
        when=lambda self, source: source.space is not IndexSpace.SLOT and self._sparse_metadata.block_table is not None
    )
    def sparse_table_of_pages_of_64__behind_slots(self, slots, *, source, request):
        """Positions are divided into pages of 64 tokens, whatever the pages of the cache are."""
        position, table = source.indices.long(), self._sparse_metadata.block_table.long()
        columns = (position // 64).clamp(0, table.shape[1] - 1)
        return table[request.unsqueeze(1), columns] * source.cache.shape[1] + position % 64 % source.cache.shape[1]

    def sparse_gathered_start_of_request_in_six_bits__before_slots(self, request, *, source):
        """Where a request's gathered keys begin is looked up at its number modulo 64."""
        return request if source.paged else request % 64
