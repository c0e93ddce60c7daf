"""A layer whose metadata describe another batch."""

from dataclasses import fields, replace

import torch

from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


@known_defect(
    "prefix-cache-without-chunked-prefill-missing-metadata",
    killed_by="mixed_batch",
    sources=("vllm-project/vllm#14009", "vllm-project/vllm#14069"),
)
class ContextOfSplitPromptsOnly(EagerLayer):
    """Chunks of context are planned where prompts are split, and a cached prefix without that is ignored."""

    class builder_class(MLACommonMetadataBuilder):
        def _plan(self, context_lens):
            return super()._plan(context_lens) if self.chunked_prefill_enabled else None


class _TablesByToken(MLACommonMetadata):
    @property
    def prefill_metadata(self):
        metadata = super().prefill_metadata
        if metadata is not None and not self.prefills_first:
            metadata.block_table = self.block_tables.roll(-self.num_decode_tokens, 0)[: self.num_prefills]
        return metadata


@known_defect(
    "decode-prefill-split-tokens-vs-requests",
    killed_by="mixed_batch",
    sources=("vllm-project/vllm#25196", "vllm-project/vllm#26499"),
)
class TablesByToken(EagerLayer):
    """The prefills' rows of the block table are sliced by the number of decode tokens, not by that of decodes."""

    class builder_class(MLACommonMetadataBuilder):
        def _assemble(self, common, prefills, prefills_first, use_cuda_graph):
            metadata = super()._assemble(common, prefills, prefills_first, use_cuda_graph)
            return _TablesByToken(**{field.name: getattr(metadata, field.name) for field in fields(metadata)})


@known_defect(
    "ascend-dummy-slots-invalidated-too-late",
    killed_by="graph_padding",
    related=("cache_write",),
    sources=("vllm-project/vllm-ascend#15417",),
)
class SlotsCopiedTooEarly(EagerLayer):
    """The builder copies the slots before those of padding are made -1, so that these are still another token's."""

    class builder_class(MLACommonMetadataBuilder):
        def _assemble(self, common, prefills, prefills_first, use_cuda_graph):
            metadata = super()._assemble(common, prefills, prefills_first, use_cuda_graph)
            slots = metadata.slot_mapping
            return replace(metadata, slot_mapping=slots.where(slots >= 0, slots.max()))


@known_defect("layer-tables-of-64-requests", killed_by="mixed_batch")
class TablesOf64Requests(EagerLayer):
    """The block table is staged for 64 requests, and later ones get the rows of the first."""

    class builder_class(MLACommonMetadataBuilder):
        def _assemble(self, common, prefills, prefills_first, use_cuda_graph):
            metadata = super()._assemble(common, prefills, prefills_first, use_cuda_graph)
            staged = torch.arange(len(metadata.block_tables), device=metadata.block_tables.device) % 64
            return replace(metadata, block_tables=metadata.block_tables[staged])
