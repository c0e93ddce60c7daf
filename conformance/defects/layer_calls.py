"""A layer that moves the wrong blocks, remembers an earlier call, or misreads what other ranks hold."""

from dataclasses import replace

import numpy as np
import torch

from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.defects.known import known_defect


def _with_stride_of(cache, other):
    """As many blocks as fit, with the stride between blocks that another cache has."""
    stride = other.stride(0)
    room = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    blocks = min(len(cache), (room - cache[0].numel()) // stride + 1)
    return cache.as_strided((blocks, *cache.shape[1:]), (stride, *cache.stride()[1:]))


def _move(source, target, pairs):
    """Copy the pairs whose blocks are within both."""
    for origin, place in pairs.tolist():
        if origin < len(source) and place < len(target):
            target.view(torch.uint8)[place] = source.view(torch.uint8)[origin]


@known_defect("copy-blocks-stride-of-the-first-cache", killed_by="cache_write")
class StrideOfTheFirstCache(EagerLayer):
    """Blocks of every cache are copied with the stride of the first one of the list."""

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        for cache in kv_caches:
            strided = _with_stride_of(cache, kv_caches[0])
            _move(strided, strided, src_to_dists)


@known_defect("copy-blocks-first-cache-only", killed_by="cache_write")
class FirstCacheOnly(EagerLayer):
    """Blocks are copied in the first cache of the list alone."""

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        EagerLayer.copy_blocks(kv_caches[:1], src_to_dists)


@known_defect("copy-blocks-one-destination-for-a-source", killed_by="cache_write")
class OneDestination(EagerLayer):
    """The copies are kept by source, so that a block which two requests share reaches the last of them only."""

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        by_source = dict(src_to_dists.tolist())
        EagerLayer.copy_blocks(kv_caches, torch.tensor(list(by_source.items()), device=src_to_dists.device))


@known_defect("swap-blocks-stride-of-the-source", killed_by="cache_write")
class StrideOfTheSource(EagerLayer):
    """Swapped blocks are written with the stride between blocks that their source has."""

    @staticmethod
    def swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst):
        _move(src_kv_cache, _with_stride_of(dst_kv_cache, src_kv_cache), src_to_dst)


@known_defect("layer-keeps-the-scale-of-its-first-call", killed_by="call_order")
class ScaleOfTheFirstCall(EagerLayer):
    """The cache's scale is read at the first call and kept."""

    class impl_class(MLACommonImpl):
        _kept = None

        def forward(self, layer, *operands, **outputs):
            self._kept = layer if self._kept is None else self._kept
            return super().forward(self._kept, *operands, **outputs)


@known_defect("layer-plans-context-once-for-as-many-prefills", killed_by="call_order")
class PlanOfTheBatchBefore(EagerLayer):
    """The chunks of the context are those of the last batch with as many prefills."""

    class builder_class(MLACommonMetadataBuilder):
        def _plan(self, context_lens):
            self._plans = getattr(self, "_plans", {})
            return self._plans.setdefault(len(context_lens), super()._plan(context_lens))


@known_defect("layer-returns-its-own-buffer", killed_by="no_side_effects")
class ResultInABuffer(EagerLayer):
    """The result is a part of a buffer that the next call writes again."""

    class impl_class(MLACommonImpl):
        _buffer = None

        def forward(self, *operands, **outputs):
            result = super().forward(*operands, **outputs)
            if outputs:
                return result
            if self._buffer is None:
                self._buffer = result.new_empty(4 * len(result), result.shape[1])
            return self._buffer[: len(result)].copy_(result)


@known_defect("layer-ignores-the-output-buffer", killed_by="mixed_batch")
class OutputIgnored(EagerLayer):
    """An output buffer is taken and left unwritten, the result is a tensor of its own."""

    class impl_class(MLACommonImpl):
        def forward(self, *operands, **outputs):
            return super().forward(*operands)


@known_defect("layer-adds-to-the-output-buffer", killed_by="mixed_batch")
class OutputAddedTo(EagerLayer):
    """The result is added to what the output buffer holds, as if it began as zeros."""

    class impl_class(MLACommonImpl):
        def forward(self, *operands, output=None):
            result = super().forward(*operands)
            return result if output is None else output.add_(result)


@known_defect("dcp-virtual-loc-used-raw", killed_by="layer_dcp")
class PositionAsSlot(EagerLayer):
    """Every rank stores every new token, at the slot of its position in the whole sequence."""

    class builder_class(MLACommonMetadataBuilder):
        def build_from_requests(self, requests, cuda_graph_pad_size=-1):
            metadata = super().build_from_requests(requests, cuda_graph_pad_size)
            if metadata.dcp_world_size == 1:
                return metadata
            slots = [self._slot(request, token) for request in requests for token in range(request.query_len)]
            new = torch.tensor(slots, device=metadata.slot_mapping.device)
            return replace(metadata, slot_mapping=torch.cat((new, metadata.slot_mapping[len(slots) :])))

        def _slot(self, request, token):
            column, offset = divmod(request.context_len + token, self.block_size)
            blocks = np.asarray(request.block_ids)
            return int(blocks[min(column, len(blocks) - 1)]) * self.block_size + offset


@known_defect("dcp-every-rank-takes-itself-for-the-first", killed_by="layer_dcp")
class AlwaysTheFirstRank(EagerLayer):
    """Slots and lengths are those of rank 0 on every rank."""

    class builder_class(MLACommonMetadataBuilder):
        def _sharding(self):
            return super()._sharding()._replace(rank=0)

        def _assemble(self, *batch, **options):
            return replace(super()._assemble(*batch, **options), dcp_rank=self.dcp_rank)


@known_defect("dcp-local-length-as-total", killed_by="layer_dcp")
class LocalTotals(EagerLayer):
    """Decodes are told of the whole sequence what this rank holds of it."""

    class builder_class(MLACommonMetadataBuilder):
        def _assemble(self, *batch, **options):
            metadata = super()._assemble(*batch, **options)
            local = metadata.dcp_local_seq_lens
            return metadata if local is None else replace(metadata, seq_lens_tensor=local)


@known_defect("dcp-ranks-merged-without-lse", killed_by="layer_dcp")
class EqualRanks(EagerLayer):
    """The ranks' results of a decode are averaged as if each held as much of the weights."""

    class impl_class(MLACommonImpl):
        def _merge_over_ranks(self, output, lse):
            return super()._merge_over_ranks(output, torch.zeros_like(lse))


@known_defect("dcp-gathered-context-not-reordered", killed_by="layer_dcp")
class RankByRank(EagerLayer):
    """Gathered context stays as it came: one rank after another, each with its padding, for all requests."""

    class impl_class(MLACommonImpl):
        def _put_in_order(self, every, index, shares):
            return every.flatten(0, 1)[: len(shares.order[index])]


@known_defect("dcp-context-unpadded-by-own-length", killed_by="layer_dcp")
class OwnLengths(EagerLayer):
    """Of what another rank sends of a chunk, no more rows count than this rank holds itself."""

    class impl_class(MLACommonImpl):
        def _put_in_order(self, every, index, shares):
            row, held = shares.order[index], int(shares.cu_seq_lens[index, -1])
            return every[row // shares.rows[index], (row % shares.rows[index]).clamp(max=max(held - 1, 0))]
