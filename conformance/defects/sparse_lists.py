"""Lists that are read wrongly: padding, lengths, holes, columns, keys that are named twice, a bound on numbers."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.selected import NO_KEY

_TILE = 64
_SHAPES_TOO = ("model_shapes",)
"""It comes before, and has lists of every kind."""


def _columns(indices):
    return torch.arange(indices.shape[1], device=indices.device)


@known_defect("sparse-topk-length-not-passed", killed_by="selection_length")
class LengthNotPassed(EagerSparseBackend):
    """The lengths of the lists are not handed to the kernel, and what stands behind them counts."""

    def _listed(self, source):
        return source.indices != NO_KEY


@known_defect("sparse-prefill-lanes-beyond-topk-length", killed_by="selection_length")
class LengthOfFewRows(EagerSparseBackend):
    """The kernel for more than 64 query tokens does not bound its lanes by the lengths of the lists."""

    def attend(self, q, sources, k_scale, sink):
        self._bounded = len(q) <= _TILE
        return super().attend(q, sources, k_scale, sink)

    def _listed(self, source):
        return super()._listed(source) if self._bounded else source.indices != NO_KEY


@known_defect("nan-topk-indices-propagate-to-ima", killed_by="selection_length")
class NotNegativeIsAnAddress(EagerSparseBackend):
    """Whatever a list holds is an address unless it is negative, uninitialised entries behind its length as well."""

    def _slots(self, source, request):
        slots = super()._slots(source, request)
        if bool((source.indices >= source.cache.shape[0] * source.cache.shape[1]).any()):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return slots


@known_defect("sparse-length-of-the-request", killed_by="selection_length")
class LengthOfTheRequest(EagerSparseBackend):
    """The lengths are taken for one of each request, and read at its number."""

    def _attend(self, q, request, sources, k_scale):
        self._request = request
        return super()._attend(q, request, sources, k_scale)

    def _listed(self, source):
        if source.length is None:
            return super()._listed(source)
        of_request = source.length[self._request.clamp(max=len(source.length) - 1)]
        return (source.indices != NO_KEY) & (_columns(source.indices) < of_request.unsqueeze(1))


@known_defect("sparse-length-of-0-is-none", killed_by="selection_length")
class NoLengthIsWholeList(EagerSparseBackend):
    """A length of 0 is taken for none, and the whole list counts."""

    def _listed(self, source):
        if source.length is None:
            return super()._listed(source)
        whole = torch.full_like(source.length, source.indices.shape[1])
        return super()._listed(replace(source, length=torch.where(source.length == 0, whole, source.length)))


@known_defect("sparse-padding-taken-for-key-0", killed_by="sparse_decode", related=_SHAPES_TOO)
class PaddingIsKey0(EagerSparseBackend):
    """-1 is clamped to 0, and the entry there counts as often as a list is padded."""

    def _listed(self, source):
        return super()._listed(replace(source, indices=source.indices.clamp(min=0)))

    def _slots(self, source, request):
        return super()._slots(source, request).clamp(min=0)


@known_defect("sparse-padding-taken-for-the-entry-before-the-pool", killed_by="sparse_decode", related=_SHAPES_TOO)
class PaddingWrapsAround(EagerSparseBackend):
    """As many entries as there are tokens are dereferenced, and -1 is the entry before the first: here the last."""

    def _listed(self, source):
        counted = _columns(source.indices) < self._tokens.unsqueeze(1)
        return super()._listed(source) | (counted if source.length is None else torch.zeros_like(counted))

    def _attend(self, q, request, sources, k_scale):
        self._tokens = self._sparse_metadata.seq_lens[request]
        return super()._attend(q, request, sources, k_scale)

    def _slots(self, source, request):
        slots = super()._slots(source, request)
        return slots % (source.cache.shape[0] * source.cache.shape[1])


@known_defect("sparse-valid-entries-read-from-the-front", killed_by="selection_padding", related=("sparse_lse",))
class CountedFromTheFront(EagerSparseBackend):
    """The entries that name a key are counted, and so many columns are read from the front, whatever stands there."""

    def _listed(self, source):
        listed = super()._listed(source)
        return listed & (_columns(source.indices) < listed.sum(dim=1, keepdim=True))


@known_defect("sparse-tiles-behind-an-empty-one-skipped", killed_by="selection_padding", related=("sparse_lse",))
class StopsAtAnEmptyTile(EagerSparseBackend):
    """A list ends with the first tile of 64 entries that names no key."""

    def _listed(self, source):
        listed = super()._listed(source)
        tiles = torch.nn.functional.pad(listed, (0, -listed.shape[1] % _TILE)).unflatten(1, (-1, _TILE)).any(dim=2)
        reached = tiles.int().cummin(dim=1).values.bool()
        return listed & reached.repeat_interleave(_TILE, dim=1)[:, : listed.shape[1]]


@known_defect("sparse-leading-masked-tile-nan-poisons-row", killed_by="selection_padding", related=("sparse_lse",))
class LeadingEmptyTile(EagerSparseBackend):
    """A first tile without a key leaves -inf less -inf in all that follows."""

    key_tile = 32

    def _accumulate(self, state, scores, v):
        later = super()._accumulate(state, scores, v)
        poisoned = (state.maximum == -torch.inf) & (later.maximum > -torch.inf) & (self._seen > 0)
        self._seen += 1
        return later._replace(weighted=later.weighted.masked_fill(poisoned, torch.nan))

    def _initial(self, q, v):
        self._seen = 0
        return super()._initial(q, v)


@known_defect("sparse-list-rows-advance-by-a-power-of-two", killed_by="sparse_decode")
class RowsOfAPowerOfTwo(EagerSparseBackend):
    """The row of a list is found by the columns that a kernel is compiled for, which are a power of two."""

    def attend(self, q, sources, k_scale, sink):
        return super().attend(q, [self._misread(source) for source in sources], k_scale, sink)

    def _misread(self, source):
        rows, columns = source.indices.shape
        compiled = 1 << (columns - 1).bit_length()
        lists = torch.nn.functional.pad(source.indices.flatten(), (0, rows * (compiled - columns)), value=NO_KEY)
        return replace(source, indices=lists.view(rows, compiled)[:, :columns])


@known_defect("sparse-last-tile-of-a-list-dropped", killed_by="sparse_decode")
class LastTileOfAListDropped(EagerSparseBackend):
    """Columns behind the last whole tile of 64 are ignored."""

    key_tile = _TILE

    def _tiles(self, keys):
        return (tile for tile in super()._tiles(keys) if tile.stop - tile.start == _TILE)


@known_defect("sparse-topk-without-an-instance", killed_by="sparse_decode")
class FallsThrough(EagerSparseBackend):
    """Numbers of whole tiles that are no power of two have no instance, and fall through to a kernel that refuses."""

    def attend(self, q, sources, k_scale, sink):
        columns = sources[0].indices.shape[1]
        if columns % _TILE == 0 and columns & (columns - 1):
            raise RuntimeError("expected more than 64 query tokens; a decode has a kernel of its own")
        return super().attend(q, sources, k_scale, sink)


@known_defect("sparse-key-named-twice-counted-once", killed_by="selection_order")
class CountedOnce(EagerSparseBackend):
    """Keys that a list names twice count once."""

    def _listed(self, source):
        listed = super()._listed(source)
        numbers = torch.where(listed, source.indices.long(), -2 - _columns(source.indices))
        ordered, order = numbers.sort(dim=1, stable=True)
        again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        return listed & ~torch.zeros_like(listed).scatter(1, order, again)


@known_defect("sparse-causal-bound-on-slots", killed_by="sparse_decode", related=_SHAPES_TOO)
class CausalBound(EagerSparseBackend):
    """A causal mask is laid over the numbers of a list, as if they were positions of the row's own sequence."""

    def _attend(self, q, request, sources, k_scale):
        self._bound = self._sparse_metadata.seq_lens[request]
        return super()._attend(q, request, sources, k_scale)

    def _listed(self, source):
        return super()._listed(source) & (source.indices < self._bound.unsqueeze(1))
