"""Numbers of a list that are taken for others: positions for slots, global for local ones, another request's table."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.defects.known import known_defect


@known_defect("sparse-position-taken-for-slot", killed_by="index_spaces")
class PositionIsSlot(EagerSparseBackend):
    """Positions are taken for slots."""

    def _slots(self, source, request):
        return super()._slots(replace(source, space=IndexSpace.SLOT), request)


@known_defect(
    "sparse-workspace-start-forgotten",
    killed_by="index_spaces",
    sources=("sgl-project/sglang#20606",),
)
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


@known_defect(
    "sparse-dcp-global-index-taken-for-local",
    killed_by="sparse_dcp",
    sources=("vllm-project/vllm#54541", "vllm-project/vllm#46514"),
)
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


@known_defect(
    "sparse-dcp-interleave-of-one",
    killed_by="sparse_dcp",
    sources=("vllm-project/vllm#54541",),
)
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


@known_defect("sparse-dcp-empty-rank-lse-of-plus-inf", killed_by="sparse_dcp", sources=("vllm-project/vllm#54541",))
class EmptyRankPlusInfinity(EagerSparseBackend):
    """A rank that holds none of a row's keys returns +inf as its LSE, and takes all of the weight."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        several = self._sparse_metadata.dcp_world_size > 1
        return output, lse.masked_fill(lse == -torch.inf, torch.inf) if several else lse
