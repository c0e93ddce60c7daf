"""Layers on several ranks: which tokens are a rank's own, and what it makes of what the others give."""

from dataclasses import replace

import numpy as np
import torch

from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


@known_defect("dcp-virtual-loc-used-raw", killed_by="layer_dcp", sources=("sgl-project/sglang#36886",))
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
