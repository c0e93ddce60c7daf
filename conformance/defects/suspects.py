"""Suspects without a report: the first things to think of when numbers are wrong, used by the diagnosis only."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend


class ScaleOfHeadDim(EagerPrefillBackend):
    """The softmax scale is (P + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5


class ScaleOfLatent(EagerPrefillBackend):
    """The softmax scale is (L + R)^-1/2, not the given one."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5


class Base2Lse(EagerPrefillBackend):
    """The LSE is in base 2, expected natural logarithm."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / torch.tensor(2.0).log()


class ConvertedTwice(EagerPrefillBackend):
    """The LSE was multiplied by ln 2 although it was natural already."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse * torch.tensor(2.0).log()


class PositiveInfinity(EagerPrefillBackend):
    """The LSE of a row without keys is +inf."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse.masked_fill(lse == -torch.inf, torch.inf)


class LeakedKey(EagerPrefillBackend):
    """The causal mask is off by one: a query sees the key after its own."""

    def _visible(self, queries, keys, tile, device):
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries + 1
        return torch.arange(tile.start, tile.stop, device=device) <= last


class HiddenKey(EagerPrefillBackend):
    """The causal mask is off by one: a query does not see its own key."""

    def _visible(self, queries, keys, tile, device):
        last = (torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1).clamp(min=0)
        return torch.arange(tile.start, tile.stop, device=device) <= last


class NoMask(EagerPrefillBackend):
    """There is no causal mask."""

    def _visible(self, queries, keys, tile, device):
        return torch.ones(queries, tile.stop - tile.start, dtype=torch.bool, device=device)


class LastKeyDropped(EagerPrefillBackend):
    """The last key of a request is dropped."""

    def _attend(self, q, k, v, causal):
        kept = max(1, k.shape[0] - 1) if k.shape[0] else 0
        return super()._attend(q, k[:kept], v[:kept], causal and kept == k.shape[0])


class LastPageDropped(EagerPrefillBackend):
    """The last, partly filled page of 16 keys of a context is dropped."""

    def _attend(self, q, k, v, causal):
        kept = k.shape[0] if causal else k.shape[0] // 16 * 16
        return super()._attend(q, k[:kept], v[:kept], causal)


class FirstTileTwice(EagerPrefillBackend):
    """The first tile of keys is counted twice."""

    def _tiles(self, keys):
        tiles = list(super()._tiles(keys))
        return iter(tiles[:1] + tiles)


class ContiguousValues(EagerPrefillBackend):
    """V is read as if it were packed."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        flat = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        packed = flat[v.storage_offset() : v.storage_offset() + v.numel()]
        missing = v.numel() - packed.numel()
        packed = torch.cat([packed, flat.new_zeros(missing)]).view(v.shape)
        return super()._batch(q, k, packed, query_start_loc, key_start_loc, causal)


class ShiftedValues(EagerPrefillBackend):
    """V is sliced one column off."""

    def _attend(self, q, k, v, causal):
        return super()._attend(q, k, v.roll(1, -1), causal)


class RotatedHeads(EagerPrefillBackend):
    """Heads are rotated by one."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output.roll(1, 1), lse.roll(1, 0)


class SwappedRequests(EagerPrefillBackend):
    """The keys of the first two requests are swapped."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if len(key_start_loc) < 3:
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        a, b = key_start_loc[1], key_start_loc[2]
        order = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, k.shape[0])])
        return super()._batch(q, k[order], v[order], query_start_loc, key_start_loc, causal)


class NormalisedTwice(EagerPrefillBackend):
    """The output is divided by the row sum twice."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return (output / state.total.transpose(0, 1)).nan_to_num(nan=0.0), lse


class NeverNormalised(EagerPrefillBackend):
    """The output is not divided by the row sum."""

    def _finish(self, state):
        _, lse = super()._finish(state)
        return state.weighted.transpose(0, 1), lse


class Zeros(EagerPrefillBackend):
    """The output is 0 everywhere."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return torch.zeros_like(output), lse


class RowsNeverWritten(EagerPrefillBackend):
    """Rows from the second tile of 64 queries on are never written."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        output[64:] = torch.nan
        return output, lse


SUSPECTS: dict[type[EagerPrefillBackend], str] = {
    ScaleOfHeadDim: "scale",
    ScaleOfLatent: "scale",
    Base2Lse: "lse",
    ConvertedTwice: "lse",
    PositiveInfinity: "empty_rows",
    LeakedKey: "masking",
    HiddenKey: "masking",
    NoMask: "masking",
    LastKeyDropped: "indexing",
    LastPageDropped: "indexing",
    FirstTileTwice: "indexing",
    ContiguousValues: "indexing",
    ShiftedValues: "indexing",
    RotatedHeads: "indexing",
    SwappedRequests: "indexing",
    NormalisedTwice: "precision",
    NeverNormalised: "precision",
    Zeros: "precision",
    RowsNeverWritten: "indexing",
}
"""Every suspect with its family, named as the families of the known defects."""
