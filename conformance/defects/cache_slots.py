"""Slots that are computed wrongly: of tokens that write entries, and of positions in lists."""

import torch

from mla_conformance.backends.cache import NO_SLOT
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.defects.known import known_defect


class _Mapped(EagerCacheBackend):
    """The arguments of a slot mapping are others, or what comes of them is."""

    def run_slot_mapping(self, slot_mapping, query_start_loc, positions, block_table, block_size, **world):
        self._map(slot_mapping, query_start_loc, positions, block_table, block_size, world)

    def _map(self, slot_mapping, query_start_loc, positions, block_table, block_size, world):
        super().run_slot_mapping(slot_mapping, query_start_loc, positions, block_table, block_size, **world)


@known_defect("slots-of-raw-tokens", killed_by="slot_mapping")
class SlotsOfRawTokens(_Mapped):
    """Every token gets a slot of its own, although an entry stands for several."""

    def _map(self, slot_mapping, query_start_loc, positions, block_table, block_size, world):
        super()._map(slot_mapping, query_start_loc, positions, block_table, block_size, {**world, "compress_ratio": 1})


@known_defect("slots-written-by-the-first-token", killed_by="slot_mapping")
class FirstTokenWrites(_Mapped):
    """The first token of an entry writes it, before the others are there."""

    def _map(self, slot_mapping, query_start_loc, positions, block_table, block_size, world):
        ratio = world["compress_ratio"]
        moved = torch.where(positions % ratio == 0, positions + ratio - 1, positions - positions % ratio)
        given = positions if ratio == 1 else moved
        super()._map(slot_mapping, query_start_loc, given, block_table, block_size, world)


@known_defect("slots-ratio-of-the-block", killed_by="slot_mapping")
class BlockOfTheRawPosition(EagerCacheBackend):
    """The column of the block table is that of the token, as if a page held as many tokens as entries."""

    def run_slot_mapping(self, slot_mapping, query_start_loc, positions, block_table, block_size, **world):
        self._ratio = world["compress_ratio"]
        super().run_slot_mapping(slot_mapping, query_start_loc, positions, block_table, block_size, **world)

    def _slots(self, block_table, request, entry, page):
        column = (entry * getattr(self, "_ratio", 1) // page).clamp(max=block_table.shape[1] - 1)
        return block_table[request, column].long() * page + entry % page


@known_defect("slots-padding-left-stale", killed_by="slot_mapping")
class PaddingLeftStale(_Mapped):
    """Slots behind the last counted token keep what an earlier batch left there."""

    def _map(self, slot_mapping, query_start_loc, positions, block_table, block_size, world):
        before, counted = slot_mapping.clone(), int(query_start_loc[-1])
        super()._map(slot_mapping, query_start_loc, positions, block_table, block_size, world)
        slot_mapping[counted:] = before[counted:]


@known_defect("slots-padding-is-slot-0", killed_by="slot_mapping")
class PaddingIsSlotZero(_Mapped):
    """Tokens that write nothing get slot 0."""

    def _map(self, slot_mapping, *arguments):
        super()._map(slot_mapping, *arguments)
        slot_mapping.clamp_(min=0)


@known_defect("slots-in-int32", killed_by="slot_mapping")
class SlotsInInt32(_Mapped):
    """Block times page wraps in 32 bits."""

    def _map(self, slot_mapping, *arguments):
        super()._map(slot_mapping, *arguments)
        slot_mapping.copy_(slot_mapping.int())


@known_defect("slots-interleave-ignored", killed_by="slot_mapping")
class InterleaveIgnored(_Mapped):
    """Entries are dealt out to ranks one by one, whatever their interleave is."""

    def _map(self, slot_mapping, query_start_loc, positions, block_table, block_size, world):
        alone = {**world, "cp_kv_cache_interleave_size": 1}
        super()._map(slot_mapping, query_start_loc, positions, block_table, block_size, alone)


@known_defect("slots-of-all-ranks", killed_by="slot_mapping")
class SlotsOfAllRanks(_Mapped):
    """A rank writes the entries of all ranks, as if its cache were replicated."""

    def _map(self, slot_mapping, query_start_loc, positions, block_table, block_size, world):
        super()._map(slot_mapping, query_start_loc, positions, block_table, block_size, world)
        request = torch.arange(len(block_table)).to(positions.device).repeat_interleave(query_start_loc.diff())
        entry, rest = positions[: len(request)] // world["compress_ratio"], positions[: len(request)] + 1
        slots = self._slots(block_table, request, entry, block_size)
        last = rest % world["compress_ratio"] == 0
        slot_mapping[: len(request)] = slots.where(last, NO_SLOT).to(slot_mapping.dtype)


@known_defect("slots-of-the-query-number", killed_by="slot_mapping")
class SlotsOfTheQueryNumber(_Mapped):
    """The position of a token is its number among the new ones, without its context."""

    def _map(self, slot_mapping, query_start_loc, positions, block_table, block_size, world):
        counted = int(query_start_loc[-1])
        request = torch.arange(len(query_start_loc) - 1, device=positions.device)
        first = query_start_loc[request.repeat_interleave(query_start_loc.diff())]
        alone = torch.arange(counted, device=positions.device) - first
        super()._map(slot_mapping, query_start_loc, alone, block_table, block_size, world)


class _Lists(EagerCacheBackend):
    """Lists are read otherwise."""

    def run_global_slots(self, out, req_id_per_token, block_table, token_indices, block_size):
        self._fill(out, req_id_per_token, block_table, token_indices, block_size)

    def _fill(self, *arguments):
        super().run_global_slots(*arguments)


@known_defect("list-positions-passed-on", killed_by="global_slots")
class PositionsPassedOn(_Lists):
    """Positions in a request are passed on as slots."""

    def _fill(self, out, req_id_per_token, block_table, token_indices, block_size):
        out.copy_(token_indices)


@known_defect("list-of-the-row-number", killed_by="global_slots")
class RowIsTheRequest(_Lists):
    """The number of a row is taken for that of its request."""

    def _fill(self, out, req_id_per_token, block_table, token_indices, block_size):
        rows = torch.arange(len(out), device=out.device).clamp(max=len(block_table) - 1).int()
        super()._fill(out, rows, block_table, token_indices, block_size)


@known_defect("list-padding-becomes-slot-0", killed_by="global_slots")
class PaddingBecomesSlotZero(_Lists):
    """What has no slot in a list becomes slot 0, which readers take for an entry."""

    def _fill(self, out, *arguments):
        super()._fill(out, *arguments)
        out.clamp_(min=0)


@known_defect("list-beyond-the-table-clamped", killed_by="global_slots")
class BeyondTheTableClamped(_Lists):
    """A position beyond the block table becomes a slot of its last column."""

    def _fill(self, out, req_id_per_token, block_table, token_indices, block_size):
        most = block_table.shape[1] * block_size - 1
        super()._fill(out, req_id_per_token, block_table, token_indices.clamp(max=most), block_size)


@known_defect("list-page-of-64", killed_by="global_slots")
class PageOf64(_Lists):
    """Pages are taken to hold 64 entries."""

    def _fill(self, out, req_id_per_token, block_table, token_indices, block_size):
        super()._fill(out, req_id_per_token, block_table, token_indices, 64)


@known_defect("list-tail-of-columns-unfilled", killed_by="global_slots")
class TailOfColumns(_Lists):
    """Of a list longer than a tile of 128 columns only whole tiles are filled."""

    def _fill(self, out, req_id_per_token, block_table, token_indices, block_size):
        before, whole = out.clone(), out.shape[1] // 128 * 128 or out.shape[1]
        super()._fill(out, req_id_per_token, block_table, token_indices, block_size)
        out[:, whole:] = before[:, whole:]
