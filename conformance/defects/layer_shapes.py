"""Layers that are right for the model and the cache that they were written for."""

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


class _ScaleOfOneModel(EagerDecodeBackend):
    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self.scale = 1.59 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


@known_defect("layer-decodes-with-scale-of-one-model", killed_by="call_order")
class ScaleOfOneModel(EagerLayer):
    """Decodes have the softmax scale of one model, whatever scale the layer was given."""

    decode_backend = _ScaleOfOneModel


class _PackedForSeveralTokens(EagerDecodeBackend):
    def _entries(self, kv_cache, request, tile):
        _, page, width = kv_cache.shape
        packed = kv_cache.as_strided(kv_cache.shape, (page * width, width, 1), kv_cache.storage_offset())
        several = int(self._decode_metadata.query_lens_cpu.max()) > 1
        return super()._entries(packed if several else kv_cache, request, tile)


@known_defect("layer-several-tokens-assume-packed-pages", killed_by="layer_combinations")
class PackedForSeveralTokens(EagerLayer):
    """Decodes of several tokens read a buffer that layers share as if it were packed."""

    decode_backend = _PackedForSeveralTokens
