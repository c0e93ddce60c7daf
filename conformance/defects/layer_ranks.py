"""A layer on one of several ranks that does not know which tokens are its own."""

from dataclasses import replace

import numpy as np
import torch

from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
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
