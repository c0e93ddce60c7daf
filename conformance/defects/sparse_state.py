"""Lists that outlive their call: kept for calls of the same shape, or from the capture of a graph."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.capturable import CapturableSparse
from mla_conformance.defects.known import known_defect

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
