"""Entries of selected keys that are found or read wrongly, and lists that outlive their call."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.bases import V32_SCALES, CapturableSparse, through_e8m0
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.entry_formats import TILED_FORMATS

_FP4_CODES = 256
_LAST_SCALE_OF_V4 = -2
"""A byte of padding follows."""
_UNIT = 127
"""The exponent of 1."""

_V4_TOO = ("unselected_keys", "attention_sinks", "second_cache")
_V41_TOO = ("second_cache",)
_LISTS_TOO = ("selection_padding", "selection_length", "selection_order", "selection_rows", "index_spaces")
_V32_TOO = ("model_shapes", *_LISTS_TOO, "unselected_keys", "attention_sinks", "second_cache")
"""Some of their cases have caches of these entries."""


class _Rows(EagerSparseBackend):
    """Entries of one layout are other bytes than they should be."""

    layout: str

    def _entries(self, source, slots):
        rows = super()._entries(source, slots)
        return self._read(rows.clone()) if source.layout == self.layout else rows


class _Pages(EagerSparseBackend):
    """Blocks are found as if so many bytes or values stood between them."""

    def _entries(self, source, slots):
        stride = self._stride(source)
        if stride is None:
            return super()._entries(source, slots)
        shape, start = source.cache.shape, source.cache.storage_offset()
        return super()._entries(
            replace(source, cache=source.cache.as_strided(shape, (stride, shape[2], 1), start)), slots
        )

    def _stride(self, source):
        """None where blocks are found."""
        raise NotImplementedError


@known_defect("dsv4-page-rounding-forgotten", killed_by="sparse_fp8_v4", related=_V4_TOO)
class RoundingForgotten(_Pages):
    """A block of V4 is found by the bytes of its entries, without what rounds them up."""

    def _stride(self, source):
        return source.cache.shape[1] * source.cache.shape[2] if source.layout == "fp8_v4" else None


@known_defect("dsv4-blocks-packed-over-layers-read-as-pages", killed_by="sparse_fp8_v4")
class PackedPagesOfV4(_Pages):
    """Blocks that hold the pages of several layers are read as if one page stood behind the other."""

    def _stride(self, source):
        return TILED_FORMATS["fp8_v4"].page_bytes(source.cache.shape[1]) if source.layout == "fp8_v4" else None


@known_defect("sparse-assumes-packed-pages", killed_by="sparse_decode")
class PackedPagesOfSlots(_Pages):
    """A slot is an offset into one row of entries, whatever the stride between blocks is."""

    def _stride(self, source):
        packed = source.cache.shape[1] * source.cache.shape[2]
        return packed if source.paged and source.layout not in TILED_FORMATS else None


@known_defect("dsv4-scales-read-entry-by-entry", killed_by="sparse_fp8_v4", related=_V4_TOO)
class ScalesInTheEntry(EagerSparseBackend):
    """The scales of V4's entries are looked for behind each entry's data, not behind the data of the page."""

    def _entries(self, source, slots):
        if source.layout != "fp8_v4":
            return super()._entries(source, slots)
        page = source.cache.shape[1]
        return source.cache[slots // page, slots % page]


@known_defect("dsv4-rope-taken-scaled", killed_by="sparse_fp8_v4", related=_V4_TOO)
class RopeOfV4Scaled(EagerSparseBackend):
    """The plain values of V4 are multiplied by the scale of the last tile before them."""

    def _keys(self, source, slots, visible, k_scale):
        keys = super()._keys(source, slots, visible, k_scale)
        if source.layout != "fp8_v4":
            return keys
        exponent = self._entries(source, slots)[..., _LAST_SCALE_OF_V4].float() - _UNIT
        scale = exponent.masked_fill(~visible, 0.0).exp2().unsqueeze(-1)
        return torch.cat((keys[..., :448], keys[..., 448:] * scale), dim=-1)


@known_defect("dsv41-rope-taken-unscaled", killed_by="sparse_fp8_v41", related=_V41_TOO)
class RopeOfV41Unscaled(_Rows):
    """The last 64 columns of V4.1's entries are codes like the others, and are taken without their scales."""

    layout = "fp8_v41"

    def _read(self, rows):
        rows[..., -2:] = _UNIT
        return rows


@known_defect("ue8m0-bias-of-128", killed_by="sparse_fp8_v4", related=_V4_TOO)
class BiasOf128(EagerSparseBackend):
    """The exponents of tiles have a bias of 128, so that every scale is half as large."""

    def _keys(self, source, slots, visible, k_scale):
        keys = super()._keys(source, slots, visible, k_scale)
        form = TILED_FORMATS.get(source.layout)
        coded = form.coded if form and form.scales == "ue8m0" else 0
        return torch.cat((keys[..., :coded] / 2, keys[..., coded:]), dim=-1)


@known_defect("e2m1-halves-of-a-byte-swapped", killed_by="sparse_fp4_v41", related=_V41_TOO)
class HalvesSwapped(_Rows):
    """The first of two 4-bit codes is taken from the high half of their byte."""

    layout = "fp4_v41"

    def _read(self, rows):
        codes = rows[..., :_FP4_CODES]
        rows[..., :_FP4_CODES] = (codes >> 4) | (codes << 4)
        return rows


@known_defect("e2m1-scales-of-32", killed_by="sparse_fp4_v41", related=_V41_TOO)
class ScalesOf32(_Rows):
    """Two tiles of 16 4-bit codes share the scale of the first."""

    layout = "fp4_v41"

    def _read(self, rows):
        scales = rows[..., _FP4_CODES:]
        rows[..., _FP4_CODES:] = scales[..., ::2].repeat_interleave(2, dim=-1)
        return rows


@known_defect("sparse-fp8-ds-mla-float-scale-read-as-e8m0", killed_by="sparse_fp8_ds_mla", related=_V32_TOO)
class FloatScalesToPowersOfTwo(_Rows):
    """The float32 scales of V3.2's entries pass through e8m0, which holds powers of two."""

    layout = "fp8_ds_mla"

    def _read(self, rows):
        return through_e8m0(rows)


@known_defect("sparse-scale-of-the-first-tile", killed_by="sparse_fp8_ds_mla", related=_V32_TOO)
class ScaleOfTheFirstTile(_Rows):
    """The four tiles of V3.2's entries take the scale of the first."""

    layout = "fp8_ds_mla"

    def _read(self, rows):
        rows[..., V32_SCALES] = rows[..., 512:516].repeat(*[1] * (rows.dim() - 1), 4)
        return rows


@known_defect("sparse-k-scale-on-tiled-entries", killed_by="sparse_fp8_ds_mla", related=_V32_TOO)
class KeyScaleOnTiles(EagerSparseBackend):
    """Entries whose tiles have scales of their own are multiplied by that of the cache as well."""

    def _keys(self, source, slots, visible, k_scale):
        keys = super()._keys(source, slots, visible, k_scale)
        return keys * k_scale if source.layout in TILED_FORMATS else keys


@known_defect("sparse-k-scale-ignored", killed_by="sparse_fp8", related=("unselected_keys",))
class KeyScaleIgnored(EagerSparseBackend):
    """Codes of an e4m3 cache are read as values."""

    def _keys(self, source, slots, visible, k_scale):
        return super()._keys(source, slots, visible, torch.ones_like(k_scale))


_OVERWRITTEN_TOO = ("call_order",)
"""It overwrites the operands in place as well."""


@known_defect("sparse-lists-kept-by-shape", killed_by="call_order", related=("selection_order",))
class ListsKeptByShape(EagerSparseBackend):
    """Converted lists are kept, and found again by the shape of the lists and of the cache."""

    def _slots(self, source, request):
        key = (source.indices.shape, source.cache.shape, self._sparse_metadata.dcp_rank)
        return self.__dict__.setdefault("kept", {}).setdefault(key, super()._slots(source, request))


@known_defect("sparse-workspace-of-the-first-batch", killed_by="call_order")
class RoomOfTheFirstBatch(EagerSparseBackend):
    """Buffers are made for the query tokens of the first batch and one more, and further ones stay 0."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        output[self.__dict__.setdefault("room", len(q) + 1) :] = 0.0
        return output, lse


@known_defect("sparse-replay-keeps-the-lists", killed_by="cuda_graph", related=_OVERWRITTEN_TOO)
class ListsOfTheCapture(CapturableSparse):
    """A replay attends by the lists that stood in the buffers when they were captured."""

    def attend(self, q, sources, k_scale, sink):
        captured = self.__dict__.setdefault("captured", {})
        address = sources[0].indices.data_ptr()
        _, lists = captured.setdefault(address, (sources[0].indices, sources[0].indices.clone()))
        kept = lists if lists.shape == sources[0].indices.shape else sources[0].indices
        return super().attend(q, [replace(sources[0], indices=kept), *sources[1:]], k_scale, sink)


@known_defect("sparse-replay-keeps-the-longest-list", killed_by="cuda_graph", related=_OVERWRITTEN_TOO)
class LongestListOfTheCapture(CapturableSparse):
    """Columns are bounded by the longest list of the batch that was captured."""

    def attend(self, q, sources, k_scale, sink):
        captured = self.__dict__.setdefault("captured", {})
        main, columns = sources[0], torch.arange(sources[0].indices.shape[1])
        used = int((self._listed(main) * (columns + 1)).amax())
        _, longest = captured.setdefault(main.indices.data_ptr(), (main.indices, used))
        bounded = main.indices.masked_fill(columns >= longest, -1)
        return super().attend(q, [replace(main, indices=bounded), *sources[1:]], k_scale, sink)
