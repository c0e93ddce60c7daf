"""Suspects of prefill: masks, rows and columns of packed batches, and the scale of quantised output."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.candidates import suspect
from mla_conformance.defects.suspects import DividesByZero


@suspect("scale")
class ScaleOfHeadDim(EagerPrefillBackend):
    """The softmax scale is (P + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5


@suspect("scale")
class ScaleOfLatent(EagerPrefillBackend):
    """The softmax scale is (L + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5


@suspect("masking")
class LeakedKey(EagerPrefillBackend):
    """The causal mask is off by one: a query sees the key after its own."""

    def _visible(self, queries, keys, tile, device):
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries + 1
        return torch.arange(tile.start, tile.stop, device=device) <= last


@suspect("masking")
class HiddenKey(EagerPrefillBackend):
    """The causal mask is off by one: a query does not see its own key."""

    def _visible(self, queries, keys, tile, device):
        last = (torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1).clamp(min=0)
        return torch.arange(tile.start, tile.stop, device=device) <= last


@suspect("masking")
class StrictMask(EagerPrefillBackend):
    """The causal mask is off by one: no query sees its own key, so that the first one sees none."""

    def _visible(self, queries, keys, tile, device):
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1
        return torch.arange(tile.start, tile.stop, device=device) <= last


@suspect("masking")
class StrictMaskDividesByZero(DividesByZero, StrictMask):
    """The causal mask is off by one: no query sees its own key, and the first one's output is 0 / 0."""


@suspect("masking")
class NoMask(EagerPrefillBackend):
    """There is no causal mask."""

    def _visible(self, queries, keys, tile, device):
        return torch.ones(queries, tile.stop - tile.start, dtype=torch.bool, device=device)


@suspect("indexing")
class LastKeyDropped(EagerPrefillBackend):
    """The last key of a request is dropped."""

    def _attend(self, q, k, v, causal):
        kept = max(1, k.shape[0] - 1) if k.shape[0] else 0
        return super()._attend(q, k[:kept], v[:kept], causal and kept == k.shape[0])


@suspect("indexing")
class LastPageDropped(EagerPrefillBackend):
    """The last, partly filled page of a context's keys is dropped (of pages of 16, for example)."""

    def _attend(self, q, k, v, causal):
        kept = k.shape[0] if causal else k.shape[0] // 16 * 16
        return super()._attend(q, k[:kept], v[:kept], causal)


@suspect("indexing")
class ContiguousValues(EagerPrefillBackend):
    """V is read as if it were packed."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        flat = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        packed = flat[v.storage_offset() : v.storage_offset() + v.numel()]
        missing = v.numel() - packed.numel()
        packed = torch.cat([packed, flat.new_zeros(missing)]).view(v.shape)
        return super()._batch(q, k, packed, query_start_loc, key_start_loc, causal)


@suspect("indexing")
class ShiftedValues(EagerPrefillBackend):
    """V is sliced one column off."""

    def _attend(self, q, k, v, causal):
        return super()._attend(q, k, v.roll(1, -1), causal)


@suspect("indexing")
class SwappedRequests(EagerPrefillBackend):
    """The keys of the first two requests are swapped."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if len(key_start_loc) < 3:
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        a, b = key_start_loc[1], key_start_loc[2]
        order = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, k.shape[0])])
        return super()._batch(q, k[order], v[order], query_start_loc, key_start_loc, causal)


@suspect("indexing")
class RowsNeverWritten(EagerPrefillBackend):
    """Only the first rows are ever written (the first 64, for example)."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        output[64:] = torch.nan
        return output, lse


@suspect("quant_output")
class OutputScaleTwice(EagerPrefillBackend):
    """The quantised output is divided by its scale twice."""

    def _quantise(self, accumulated, output_scale):
        return super()._quantise(accumulated / output_scale, output_scale)


@suspect("quant_output")
class OutputScaleLeftOut(EagerPrefillBackend):
    """The quantised output is not divided by its scale."""

    def _quantise(self, accumulated, output_scale):
        return super()._quantise(accumulated, torch.ones_like(output_scale))
