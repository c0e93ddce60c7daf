"""Entries that are gathered from other places, into other rows, or read as something else."""

import torch

from mla_conformance.backends.eager_cache import EagerCacheBackend, memory_of
from mla_conformance.defects.bases import V32_SCALES, packed
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.entry_formats import TILED_FORMATS

_VECTOR = 16


@known_defect("gather-truncates-addresses", killed_by="index_gather")
class TruncatesAddresses(EagerCacheBackend):
    """Addresses of entries are truncated to multiples of 16 bytes."""

    def _gathered(self, cache, slots):
        form, addresses = TILED_FORMATS.get(self.kv_cache_dtype), self._addresses(cache, slots)
        if form is not None and form.cache == "index":
            vectors = torch.arange(form.code_bytes, device=slots.device) // _VECTOR * _VECTOR
            addresses[:, : form.code_bytes] -= addresses[:, vectors] % _VECTOR
        return memory_of(cache)[addresses].view(cache.dtype)


@known_defect("gather-ignores-the-page-stride", killed_by="latent_gather")
class GathersPackedPages(EagerCacheBackend):
    """A block is found by its own bytes, whatever the stride between blocks is."""

    def _gathered(self, cache, slots):
        return super()._gathered(packed(cache), slots)


class _Elsewhere(EagerCacheBackend):
    """Slots may be none of the cache's; then its first or its last is read."""

    def _gathered(self, cache, slots):
        return super()._gathered(cache, slots.clamp(0, cache.shape[0] * cache.shape[1] - 1))


class _Requests(_Elsewhere):
    """Entries are looked for elsewhere in a request."""

    def _slots_of_requests(self, page, block_table, cu_seq_lens, seq_starts, compress_ratio):
        starts = self._starts(seq_starts, page, compress_ratio).int()
        return super()._slots_of_requests(page, block_table, cu_seq_lens, starts, compress_ratio)


@known_defect("gather-starts-at-a-page", killed_by="latent_gather")
class StartsAtThePage(_Requests):
    """A start inside of a page is taken for the page's first entry."""

    def _starts(self, seq_starts, page, compress_ratio):
        return seq_starts // (page * compress_ratio) * page * compress_ratio


@known_defect("gather-starts-at-zero", killed_by="latent_gather")
class StartsAtZero(_Requests):
    """Starts are ignored: every request is gathered from its first entry."""

    def _starts(self, seq_starts, page, compress_ratio):
        return torch.zeros_like(seq_starts)


@known_defect("gather-start-not-compressed", killed_by="latent_gather")
class StartsInTokens(_Requests):
    """A start in tokens is taken for one in entries."""

    def _starts(self, seq_starts, page, compress_ratio):
        return seq_starts * compress_ratio


@known_defect("gather-tail-skipped-by-the-ratio", killed_by="latent_gather")
class SkipsTheTail(EagerCacheBackend):
    """Rows of the workspace beyond its entries over the ratio are skipped."""

    def run_gather_latent(self, kv_cache, workspace, block_table, cu_seq_lens, seq_starts, k_scale, compress_ratio=1):
        before, room = workspace.clone(), len(workspace) // compress_ratio
        super().run_gather_latent(kv_cache, workspace, block_table, cu_seq_lens, seq_starts, k_scale, compress_ratio)
        workspace[room:] = before[room:]


@known_defect("gather-takes-the-table-for-slots", killed_by="latent_gather")
class TableOfSlots(_Elsewhere):
    """Pages are taken to hold one entry: the block table names slots."""

    def _slots_of_requests(self, page, *further):
        return super()._slots_of_requests(1, *further)


@known_defect("gather-copies-the-last-page-whole", killed_by="latent_gather")
class CopiesWholePages(EagerCacheBackend):
    """The last page of the last request is copied with its tail, into rows that nobody asked for."""

    def run_gather_latent(self, kv_cache, workspace, block_table, cu_seq_lens, *further, **options):
        super().run_gather_latent(kv_cache, workspace, block_table, cu_seq_lens, *further, **options)
        rows = int(cu_seq_lens[-1])
        workspace[rows : rows + kv_cache.shape[1]] = workspace[max(0, rows - 1) : rows]


@known_defect("gather-clears-the-workspace", killed_by="latent_gather")
class ClearsTheWorkspace(EagerCacheBackend):
    """Rows behind those that are gathered are filled with zeros."""

    def run_gather_latent(self, kv_cache, workspace, *further, **options):
        workspace.view(torch.uint8).zero_()
        super().run_gather_latent(kv_cache, workspace, *further, **options)


@known_defect("gather-counts-requests-without-entries", killed_by="latent_gather")
class CountsEmptyRequests(EagerCacheBackend):
    """Behind a request without entries the block table of the wrong request is read."""

    def _slots(self, block_table, request, entry, page):
        present, place = request.unique(return_inverse=True)
        return super()._slots(block_table, place if len(present) else request, entry, page).clamp(min=0)


@known_defect("gather-tile-scale-as-power-of-two", killed_by="latent_gather")
class ScalesReadAsPowers(EagerCacheBackend):
    """Float32 scales of tiles are read as the power of two below."""

    def _meaning(self, entries, k_scale, dtype):
        if self.kv_cache_dtype == "fp8_ds_mla":
            entries = entries.clone()
            scales = entries[:, V32_SCALES].contiguous().view(torch.float32)
            entries[:, V32_SCALES] = scales.log2().floor().exp2().view(torch.uint8)
        return super()._meaning(entries, k_scale, dtype)


@known_defect("gather-without-the-scale", killed_by="latent_gather")
class DequantisesUnscaled(EagerCacheBackend):
    """Codes of an fp8 cache are widened as they are."""

    def _meaning(self, entries, k_scale, dtype):
        return super()._meaning(entries, torch.ones_like(k_scale), dtype)


@known_defect("gather-rope-as-bf16", killed_by="latent_gather")
class RopeAsBF16(EagerCacheBackend):
    """The rotated part of an entry is read as bfloat16, whatever the model's dtype is."""

    def _meaning(self, entries, k_scale, dtype):
        form = TILED_FORMATS.get(self.kv_cache_dtype)
        known = torch.bfloat16 if form is not None and form.plain and not form.plain_codes else dtype
        return super()._meaning(entries, k_scale, known).to(dtype)


@known_defect("gather-scale-rounded-before", killed_by="latent_gather")
class RoundsTwice(EagerCacheBackend):
    """Scales are rounded to the model's dtype before codes are multiplied with them."""

    def _meaning(self, entries, k_scale, dtype):
        if self.kv_cache_dtype != "fp8" or dtype == torch.float32:
            return super()._meaning(entries, k_scale, dtype)
        return (entries.to(dtype) * k_scale.to(dtype)).to(dtype)


class _OtherLayout(EagerCacheBackend):
    """Pages of one layout are read as those of another one."""

    layout: str
    taken_for: str

    def _gathered(self, cache, slots):
        if self.kv_cache_dtype != self.layout:
            return super()._gathered(cache, slots)
        other = EagerCacheBackend(self.kv_lora_rank, 0, self.taken_for, self.tile_scales, None)
        return other._gathered(cache, slots)


@known_defect("index-gather-reads-scales-beside-codes", killed_by="index_gather")
class ReadsInterleaved(_OtherLayout):
    """Scales of index keys are read behind their codes."""

    layout, taken_for = "fp8_index", "fp8_index_flat"


@known_defect("index-gather-reads-shuffled-as-flat", killed_by="index_gather")
class ReadsUnshuffled(_OtherLayout):
    """Codes of a shuffled page are read token after token."""

    layout, taken_for = "fp8_index_shuffled", "fp8_index"


@known_defect("index-gather-scale-of-the-page", killed_by="index_gather")
class ScaleOfThePage(EagerCacheBackend):
    """All keys of a request get the scale of the first key that is gathered."""

    def _scales(self, data):
        scales = super()._scales(data)
        return scales[:1].expand_as(scales)
