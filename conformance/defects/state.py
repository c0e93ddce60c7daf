"""State that outlives a call: caches with incomplete keys, stale buffers, modes that another call set."""

from typing import ClassVar

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.defects.known import known_defect


@known_defect("cudnn-graph-cache-key-omits-strides", killed_by="call_order")
class GraphKeptItsStrides(EagerPrefillBackend):
    """A compiled graph is cached by shape and replays the strides that V had in the first call."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        self.__dict__.setdefault("graphs", {}).setdefault((q.shape, v.shape), v.stride())
        strides = self.graphs[q.shape, v.shape]
        offset = torch.full(v.shape, v.storage_offset())
        for size, stride, dim in zip(v.shape, strides, range(3), strict=True):
            offset += (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(3)])
        storage = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        return super().run_prefill_new_tokens(
            q, k, storage[offset % len(storage)], return_softmax_lse, out, output_scale
        )


@known_defect("tma-descriptor-cache-stale", killed_by="call_order")
class DescriptorOfAnAddress(EagerPrefillBackend):
    """A descriptor is cached by address; a hit reads what K was when it was made."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        kept = self.__dict__.setdefault("descriptors", {}).setdefault((k.data_ptr(), k.shape), k.clone())
        return super().run_prefill_new_tokens(q, kept, v, return_softmax_lse, out, output_scale)


@known_defect("prefill-pdl-chain-nan", killed_by="call_order")
class ReadsBeforeTheProducer(EagerPrefillBackend):
    """The first tile of K is read before its producer has written it: it is the previous call's."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        previous, self.previous = getattr(self, "previous", k), k.clone()
        if previous.shape == k.shape:
            k = torch.cat([previous[:16], k[16:]])
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


@known_defect("decode-mutates-prefill-selection-state", killed_by="call_order")
class ContextChangesTheKernel(EagerPrefillBackend):
    """A context chunk switches the implementation that the next call of new tokens uses."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        self.switched = True
        return super().run_prefill_context_chunk(chunk_idx, q, k, v)

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if getattr(self, "switched", False):
            v = v.roll(1, 0)
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


class _EveryNth(EagerPrefillBackend):
    """Counts the calls of new tokens and makes every n-th one wrong."""

    period: int

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        self.number = getattr(self, "number", 0) + 1
        if self.number % self.period == 0:
            k = self._stale(k)
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)

    def _stale(self, k: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@known_defect("q8kv8-prefill-stream-ordering", killed_by="determinism")
class UnorderedStreams(_EveryNth):
    """Now and then attention starts before the producer on another stream has finished with K."""

    period = 11

    def _stale(self, k):
        return torch.cat([torch.zeros_like(k[:5]), k[5:]])


@known_defect("cp-async-wait-without-block-barrier-quant-kv", killed_by="determinism")
class MissingBarrier(_EveryNth):
    """Without a barrier, later tiles of K are now and then those of the tile before."""

    period = 8

    def _stale(self, k):
        return torch.cat([k[:128], k[: max(0, k.shape[0] - 128)]])[: k.shape[0]]


@known_defect("prefill-metadata-stashed-on-shared-backend", killed_by="call_order")
class SharedMetadata(EagerPrefillBackend):
    """Metadata are kept where all instances find them, so that a batch runs with those of the batch built last."""

    stashed: ClassVar[MLACommonPrefillMetadata]

    def prepare_metadata(self, prefill_metadata):
        SharedMetadata.stashed = prefill_metadata
        super().prepare_metadata(prefill_metadata)

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if causal:
            query_start_loc = key_start_loc = self.stashed.query_start_loc.tolist()
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
