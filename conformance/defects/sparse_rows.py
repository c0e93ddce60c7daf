"""Rows that take another row's list, and numbers of a list that are taken for others."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.defects.known import known_defect

_SHAPES_TOO = ("model_shapes",)
"""It comes before, and has lists of every kind."""


class _OtherLists(EagerSparseBackend):
    """Each row takes the list and the length of another."""

    def attend(self, q, sources, k_scale, sink):
        rows = self._rows(len(q))
        sources = [
            replace(each, indices=each.indices[rows], length=None if each.length is None else each.length[rows])
            for each in sources
        ]
        return super().attend(q, sources, k_scale, sink)


@known_defect("sparse-list-of-the-first-row", killed_by="sparse_decode", related=_SHAPES_TOO)
class ListOfTheFirstRow(_OtherLists):
    """The list of the first row is that of the whole call."""

    def _rows(self, tokens):
        return torch.zeros(tokens, dtype=torch.long)


@known_defect("sparse-list-of-the-request", killed_by="sparse_decode", related=_SHAPES_TOO)
class ListOfTheRequest(_OtherLists):
    """The query tokens of a request share the list of its first."""

    def _rows(self, tokens):
        metadata = self._sparse_metadata
        return metadata.query_start_loc.long()[metadata.req_id_per_token.long()]


@known_defect("sparse-list-at-the-number-of-the-request", killed_by="sparse_decode", related=_SHAPES_TOO)
class ListAtTheRequest(_OtherLists):
    """Lists are taken for one of each request, and read at its number."""

    def _rows(self, tokens):
        return self._sparse_metadata.req_id_per_token.long()


@known_defect("sparse-neighbours-attend-to-their-union", killed_by="sparse_decode", related=_SHAPES_TOO)
class UnionOfAPair(EagerSparseBackend):
    """Two rows share a gathered set of keys, and each attends to all of it."""

    def attend(self, q, sources, k_scale, sink):
        pair = (torch.arange(len(q)) ^ 1).clamp(max=len(q) - 1)
        both = [self._joined(each, pair) for each in sources]
        return super().attend(q, both, k_scale, sink)

    def _joined(self, source, pair):
        own = source.indices.masked_fill(~self._listed(source), -1)
        theirs = own[pair].masked_fill((own[pair].unsqueeze(2) == own.unsqueeze(1)).any(dim=2), -1)
        return replace(source, indices=torch.cat((own, theirs), dim=1), length=None)


@known_defect("sparse-empty-lanes-load-entry-0", killed_by="sparse_decode", related=_SHAPES_TOO)
class EmptyLanes(EagerSparseBackend):
    """Lanes without a key load entry 0, and their weight of 0 times NaN is NaN."""

    def _keys(self, source, slots, visible, k_scale):
        return super()._keys(source, slots, torch.ones_like(visible), k_scale)


@known_defect("sparse-entry-before-is-loaded-too", killed_by="unselected_keys")
class LoadsTheEntryBefore(EagerSparseBackend):
    """A load fetches the entry before in the page as well, whose weight of 0 does not silence NaN."""

    def _keys(self, source, slots, visible, k_scale):
        keys = super()._keys(source, slots, visible, k_scale)
        paired = visible & (slots % source.cache.shape[1] > 0)
        beside = super()._keys(source, (slots - 1).clamp(min=0), paired, k_scale)
        return keys + 0.0 * beside


@known_defect("sparse-heads-beyond-64-are-the-first", killed_by="sparse_decode", related=_SHAPES_TOO)
class FirstGroupOfHeads(EagerSparseBackend):
    """Heads beyond 64 get the queries of the first 64."""

    def attend(self, q, sources, k_scale, sink):
        return super().attend(q[:, torch.arange(self.num_heads) % 64], sources, k_scale, sink)


@known_defect("sparse-missing-instance-of-16-heads-and-512", killed_by="sparse_prefill")
class NoInstance(EagerSparseBackend):
    """A prefill of 16 heads over lists of 512 has no instance."""

    def attend(self, q, sources, k_scale, sink):
        if not sources[0].paged and self.num_heads == 16 and sources[0].indices.shape[1] == 512:
            raise RuntimeError("Unsupported sparse-MLA prefill configuration: num_heads=16 topk=512")
        return super().attend(q, sources, k_scale, sink)


@known_defect("sparse-entries-without-rope-refused", killed_by="sparse_decode")
class RefusesNoRope(EagerSparseBackend):
    """Keys without rotated columns are refused unless lengths of lists come with them."""

    def attend(self, q, sources, k_scale, sink):
        if not self.qk_rope_head_dim and any(source.length is None for source in sources):
            raise ValueError("Native qk_rope_head_dim=0 MLA requires sparse_mla_top_k_lens")
        return super().attend(q, sources, k_scale, sink)


@known_defect("sparse-tile-of-16-heads-overwrites-the-next-row", killed_by="sparse_decode", related=_SHAPES_TOO)
class TileOfHeadsOverwrites(EagerSparseBackend):
    """Stores of 16 heads overwrite the next row where there are fewer."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        output[1:, : -self.num_heads % 16] = 0.0
        return output, lse


@known_defect("sparse-rows-in-blocks-of-64-lose-the-last", killed_by="sparse_prefill", related=_SHAPES_TOO)
class WholeBlocksOfRows(EagerSparseBackend):
    """Beyond 64 rows a launch has whole blocks of 64, and the rows of the last, partial one stay 0."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        if len(q) > 64:
            output[len(q) // 64 * 64 :] = 0.0
        return output, lse


@known_defect("sparse-position-taken-for-slot", killed_by="index_spaces")
class PositionIsSlot(EagerSparseBackend):
    """Positions are taken for slots."""

    def _slots(self, source, request):
        return super()._slots(replace(source, space=IndexSpace.SLOT), request)


@known_defect("sparse-workspace-start-forgotten", killed_by="index_spaces")
class StartForgotten(EagerSparseBackend):
    """Positions count from the first gathered key, not from that at which the request begins."""

    def _slots(self, source, request):
        first = torch.zeros_like(request) if self._sparse_metadata.block_table is None else request
        return super()._slots(source, first)


@known_defect("sparse-table-row-of-the-token", killed_by="index_spaces")
class TableRowOfTheQueryToken(EagerSparseBackend):
    """The table has a row for each request and is read at the number of the query token."""

    def _attend(self, q, request, sources, k_scale):
        rows = torch.arange(len(request), device=request.device).clamp(max=len(self._sparse_metadata.seq_lens) - 1)
        return super()._attend(q, rows, sources, k_scale)


@known_defect("sparse-table-of-pages-of-64", killed_by="index_spaces")
class TableOfPagesOf64(EagerSparseBackend):
    """Positions are divided into pages of 64 tokens, whatever the pages of the cache are."""

    def _slots(self, source, request):
        slots = super()._slots(source, request)
        metadata = self._sparse_metadata
        if source.space is IndexSpace.SLOT or metadata.block_table is None:
            return slots
        position, page = source.indices.long(), source.cache.shape[1]
        columns = (position // 64).clamp(0, metadata.block_table.shape[1] - 1)
        blocks = metadata.block_table.long()[request.unsqueeze(1), columns]
        return blocks * page + position % 64 % page


@known_defect("sparse-dcp-global-index-taken-for-local", killed_by="sparse_dcp")
class GlobalIsLocal(EagerSparseBackend):
    """Positions on all ranks are taken for tokens of this rank, and looked up in its table."""

    def _attend(self, q, request, sources, k_scale):
        return super()._attend(q, request, [self._localised(source) for source in sources], k_scale)

    def _localised(self, source):
        return replace(source, space=IndexSpace.RANK_LOCAL) if source.space is IndexSpace.POSITION else source


@known_defect("sparse-dcp-keys-of-others-counted", killed_by="sparse_dcp")
class KeysOfOthers(EagerSparseBackend):
    """Positions that another rank holds are not left out, and read what this rank holds at the same place."""

    def _held(self, source):
        return torch.ones_like(super()._held(source))


@known_defect("sparse-dcp-interleave-of-one", killed_by="sparse_dcp")
class InterleaveOfOne(EagerSparseBackend):
    """Tokens are dealt out to ranks one by one, whatever the interleave is."""

    def prepare_metadata(self, sparse_metadata):
        super().prepare_metadata(replace(sparse_metadata, cp_kv_cache_interleave_size=1))


@known_defect("sparse-dcp-local-index-divided-again", killed_by="sparse_dcp")
class DividedAgain(EagerSparseBackend):
    """Lists that a rank has already filtered to its own tokens are taken for positions on all ranks."""

    def _attend(self, q, request, sources, k_scale):
        return super()._attend(q, request, [self._globalised(source) for source in sources], k_scale)

    def _globalised(self, source):
        return replace(source, space=IndexSpace.POSITION) if source.space is IndexSpace.RANK_LOCAL else source


@known_defect("sparse-dcp-empty-rank-lse-of-plus-inf", killed_by="sparse_dcp")
class EmptyRankPlusInfinity(EagerSparseBackend):
    """A rank that holds none of a row's keys returns +inf as its LSE, and takes all of the weight."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        several = self._sparse_metadata.dcp_world_size > 1
        return output, lse.masked_fill(lse == -torch.inf, torch.inf) if several else lse
