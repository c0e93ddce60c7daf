"""Wrong kernels over selected keys where lists, caches, heads and rows of certain sizes meet; each alone is served."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.defects.bases import V32_SCALES
from mla_conformance.defects.known import known_defect
from mla_conformance.defects.sparse_lists import CountedOnce
from mla_conformance.reference.selected import NO_KEY

_TILE = 64


@known_defect("sparse-whole-tiles-of-a-list-read-one-more", killed_by="sparse_combinations")
class OneTileMore(EagerSparseBackend):
    """A list whose length is a multiple of 64 is read one tile further, and what stands there counts."""

    def _listed(self, source):
        length = source.length
        if length is not None:
            length = torch.where((length > 0) & (length % _TILE == 0), length + _TILE, length)
        return super()._listed(replace(source, length=length))


@known_defect("sparse-second-list-cut-to-the-first", killed_by="second_cache")
class SecondListCut(EagerSparseBackend):
    """Lists of the second cache have no more columns than those of the first; further ones are ignored."""

    def attend(self, q, sources, k_scale, sink):
        columns = sources[0].indices.shape[1]
        cut = [
            replace(each, indices=each.indices[:, :columns], length=_at_most(each.length, columns)) for each in sources
        ]
        return super().attend(q, cut, k_scale, sink)


def _at_most(length, columns):
    return None if length is None else length.clamp(max=columns)


@known_defect("sparse-empty-second-list-is-whole", killed_by="sparse_combinations")
class EmptySecondListIsWhole(EagerSparseBackend):
    """In the second cache a length of 0 is taken for none, and the whole list counts."""

    def _attend(self, q, request, sources, k_scale):
        return super()._attend(q, request, [*sources[:1], *map(self._whole, sources[1:])], k_scale)

    def _whole(self, source):
        if source.length is None:
            return source
        columns = torch.full_like(source.length, source.indices.shape[1])
        return replace(source, length=torch.where(source.length == 0, columns, source.length))


@known_defect("sparse-second-codes-unscaled-beside-a-plain-cache", killed_by="sparse_combinations")
class SecondCodesUnscaled(EagerSparseBackend):
    """Beside a first cache without codes there is no scale, and the codes of a second one are read as values."""

    def attend(self, q, sources, k_scale, sink):
        scale = torch.ones_like(k_scale) if sources[0].layout == "auto" else k_scale
        return super().attend(q, sources, scale, sink)


@known_defect("sparse-lse-of-two-caches-with-the-sink", killed_by="second_cache")
class LseOfTwoWithTheSink(EagerSparseBackend):
    """Where the states of two caches are merged, the sink enters the LSE as well."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output, lse if sink is None or len(sources) == 1 else torch.logaddexp(lse, sink.unsqueeze(1))


@known_defect("sparse-empty-row-beside-a-sink-of-minus-inf", killed_by="attention_sinks")
class EmptyBesideNoSink(EagerSparseBackend):
    """Without keys and with a sink of -inf the sum of weights is 0, and 0 / 0 is returned."""

    def _with_sink(self, output, lse, sink):
        shared = super()._with_sink(output, lse, sink)
        if sink is None:
            return shared
        empty = (lse == -torch.inf) & (sink == -torch.inf).unsqueeze(1)
        return shared.masked_fill(empty.mT.unsqueeze(-1), torch.nan)


@known_defect("sparse-empty-rows-behind-64-not-written", killed_by="selection_length")
class LateEmptyRows(EagerSparseBackend):
    """From the second block of 64 rows on, a row whose list names nothing holds what the buffer held."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        late = torch.arange(len(q), device=q.device).unsqueeze(1) >= _TILE
        return output.masked_fill((late & (lse == -torch.inf).mT).unsqueeze(-1), torch.nan), lse


@known_defect("sparse-last-tile-of-packed-rows-lost", killed_by="model_shapes")
class TailOfPackedRows(EagerSparseBackend):
    """Several rows and their heads are packed into tiles of 64; behind the first a partial one is lost."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        rows = len(q) * self.num_heads
        if len(q) > 1 and rows > _TILE:
            output.flatten(0, 1)[rows // _TILE * _TILE :] = 0.0
        return output, lse


@known_defect("sparse-second-head-group-loses-a-partial-tile", killed_by="sparse_combinations")
class SecondGroupOfHeads(EagerSparseBackend):
    """Heads beyond 64 read whole tiles of 64 columns only, if a list has one."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        whole, whole_lse = super().attend(q, [self._whole(each) for each in sources], k_scale, sink)
        second = torch.arange(self.num_heads, device=q.device).unsqueeze(1) >= _TILE
        return torch.where(second, whole, output), torch.where(second, whole_lse, lse)

    def _whole(self, source):
        columns = max(_TILE, source.indices.shape[1] // _TILE * _TILE)
        return replace(source, indices=source.indices[:, :columns], length=_at_most(source.length, columns))


@known_defect("sparse-slot-in-fifteen-bits", killed_by="sparse_decode")
class SlotInFifteenBits(EagerSparseBackend):
    """A slot is a signed number of two bytes, too few for many large pages."""

    def _slots(self, source, request):
        slots = super()._slots(source, request)
        return slots & 0x7FFF if source.paged else slots


@known_defect("sparse-table-rows-as-wide-as-the-first", killed_by="sparse_combinations")
class TableOfTheFirstRequest(EagerSparseBackend):
    """Positions are looked up in a table whose rows are found by the pages of the first request, not of the longest."""

    def _slots(self, source, request):
        metadata, page = self._sparse_metadata, source.cache.shape[1]
        if source.space != IndexSpace.POSITION or metadata.block_table is None or metadata.dcp_world_size > 1:
            return super()._slots(source, request)
        held, position = -(-metadata.seq_lens // page), source.indices.long().clamp(min=0)
        width = metadata.block_table.shape[1]
        columns = (position // page).clamp(max=width - 1)
        rows = request.unsqueeze(1) * (width - int(held.max() - held[0]))
        return metadata.block_table.long().flatten()[rows + columns] * page + position % page


@known_defect("sparse-gathered-start-of-request-in-six-bits", killed_by="index_spaces")
class StartInSixBits(EagerSparseBackend):
    """Where a request's gathered keys begin is looked up at its number modulo 64."""

    def _slots(self, source, request):
        return super()._slots(source, request if source.paged else request % 64)


@known_defect("sparse-key-named-twice-in-a-bounded-list-counted-once", killed_by="sparse_combinations")
class CountedOnceByLength(CountedOnce):
    """Keys that a list names twice count once where lengths are handed over."""

    def _listed(self, source):
        return EagerSparseBackend._listed(self, source) if source.length is None else super()._listed(source)


@known_defect("sparse-single-pages-take-the-first-scale", killed_by="sparse_fp8_ds_mla")
class FirstScaleOfSinglePages(EagerSparseBackend):
    """In pages of one token, the four tiles of a mixed entry take the scale of the first."""

    def _entries(self, source, slots):
        rows = super()._entries(source, slots)
        if source.layout == "fp8_ds_mla" and source.cache.shape[1] == 1:
            rows = rows.clone()
            rows[..., V32_SCALES] = rows[..., 512:516].repeat(*[1] * (rows.dim() - 1), 4)
        return rows


@known_defect("sparse-odd-head-lost-beside-an-empty-list", killed_by="sparse_combinations")
class OddHeadBesideAnEmptyList(EagerSparseBackend):
    """Heads in odd numbers are padded to even ones; beside a list that names nothing the last one is lost."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        empty = torch.stack([(each.indices == NO_KEY).all(dim=1) for each in sources]).any()
        if self.num_heads > 1 and self.num_heads % 2 and bool(empty):
            output[:, -1] = 0.0
        return output, lse


@known_defect("sparse-raw-scores-in-half", killed_by="sparse_combinations")
class RawScoresInHalf(EagerSparseBackend):
    """In an fp16 model products of queries and keys are kept in fp16 before they are scaled, and saturate."""

    def _scores(self, q, k):
        scores = super()._scores(q, k)
        return scores.clamp(max=65504 * self.scale) if q.dtype is torch.float16 else scores
