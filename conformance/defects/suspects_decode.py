"""Suspects of decode: masks, lengths and the scale of a cache of e4m3 codes."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.candidates import suspect


@suspect("scale")
class ScaleOfLatentQueries(EagerDecodeBackend):
    """The softmax scale is (L + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5


@suspect("decode_masking")
class OwnTokenHidden(EagerDecodeBackend):
    """The causal mask is off by one: a query does not see its own token."""

    def _visible(self, queries, request, seq_len, tile):
        visible = super()._visible(queries, request, seq_len, tile)
        nothing = torch.zeros_like(visible[:, :1])
        return torch.cat((visible[:, 1:], nothing), dim=1) if seq_len > 1 else visible


@suspect("decode_indexing")
class LastTokenDropped(EagerDecodeBackend):
    """The last token of a request's cache is dropped."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        return super()._attend(q, request, max(seq_len - 1, min(seq_len, 1)), kv_cache, k_scale)


@suspect("decode_indexing")
class FirstTokenDropped(EagerDecodeBackend):
    """The first token of a request's cache is dropped."""

    def _visible(self, queries, request, seq_len, tile):
        visible = super()._visible(queries, request, seq_len, tile)
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0) if seq_len > 1 else visible


@suspect("decode_pages")
class LastPageOfTokensDropped(EagerDecodeBackend):
    """The last, partly filled page of a request's cache is dropped."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        page = kv_cache.shape[1]
        return super()._attend(q, request, seq_len // page * page or seq_len, kv_cache, k_scale)


@suspect("decode_pages", "rocm-fp8-gluon-batch1-only")
class TableOfFirstRequest(EagerDecodeBackend):
    """Every request reads the pages of the first one."""

    def _blocks(self, request, pages):
        return super()._blocks(0, pages)


@suspect("decode_cache", "cutlass-mla-claims-fp8-without-scales", "fp8-compile-cache-folds-unit-scale")
class KeyScaleLeftOut(EagerDecodeBackend):
    """The scale of the e4m3 cache is not applied."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, torch.ones_like(k_scale))


@suspect("decode_cache")
class KeyScaleTwice(EagerDecodeBackend):
    """The scale of the e4m3 cache is applied twice."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, k_scale * k_scale)


@suspect("decode_cache")
class KeyScaleInverted(EagerDecodeBackend):
    """Codes of the e4m3 cache are divided by their scale, expected multiplied."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, 1 / k_scale)


@suspect("decode_cache", "fp8-mla-k-scale-vs-v-scale-inconsistent")
class KeyScaleOfKeysOnly(EagerDecodeBackend):
    """The scale of the e4m3 cache is applied to the keys and not to the values."""

    def _values(self, keys):
        return super()._values(keys) / self._scale_of_cache

    def _dequantise(self, rows, k_scale):
        self._scale_of_cache = k_scale if self.kv_cache_dtype == "fp8" else torch.ones_like(k_scale)
        return super()._dequantise(rows, k_scale)
