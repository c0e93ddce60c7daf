"""Wrong keys: another request's, permuted columns, indices that wrap; finite sentinels among masks and maxima."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.known import known_defect


class _OtherKeys(EagerPrefillBackend):
    """A request of a context chunk attends to other keys than its own."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if causal:
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        parts = []
        for request in range(len(key_start_loc) - 1):
            rows = slice(query_start_loc[request], query_start_loc[request + 1])
            keys = self._keys(request, query_start_loc, key_start_loc)
            parts.append(self._finish(self._attend(q[rows], k[keys], v[keys], causal)))
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=-1)


@known_defect(
    "flashinfer-ragged-cutlass-192-noncausal-mismatch", killed_by="context_chunk", related=("lse", "empty_rows")
)
class LastLengthForAll(_OtherKeys):
    """Without a mask, the last request's number of keys is used for every request."""

    def _keys(self, request, query_start_loc, key_start_loc):
        start, last = key_start_loc[request], key_start_loc[-1] - key_start_loc[-2]
        return slice(start, min(start + last, key_start_loc[-1]))


@known_defect("ragged-kv-offset-derived-from-q", killed_by="context_chunk", related=("lse", "empty_rows"))
class KeyOffsetOfQueries(_OtherKeys):
    """A request's keys start at the offset of its queries."""

    def _keys(self, request, query_start_loc, key_start_loc):
        length = key_start_loc[request + 1] - key_start_loc[request]
        start = min(query_start_loc[request], key_start_loc[-1] - length)
        return slice(start, start + length)


@known_defect("fa4-sm90-varlen-bug", killed_by="new_tokens")
class TilePaddedOffsets(EagerPrefillBackend):
    """The keys of later requests start at an offset that is rounded up to whole tiles."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if not causal:
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        order = torch.arange(key_start_loc[-1])
        for request in range(1, len(key_start_loc) - 1):
            start, stop = key_start_loc[request], key_start_loc[request + 1]
            shift = -(-start // 64) * 64 - start
            order[start:stop] = (order[start:stop] + shift).clamp(max=key_start_loc[-1] - 1)
        return super()._batch(q, k[order], v[order], query_start_loc, key_start_loc, causal)


@known_defect("fa4-sm120-wrong-smem-store-atom", killed_by="new_tokens")
class PermutedColumns(EagerPrefillBackend):
    """The epilogue stores every 8 × 8 block of an output row transposed."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        width = output.shape[-1] // 64 * 64
        blocks = (
            output[..., :width].unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3) if width else output.roll(1, -1)
        )
        return torch.cat([blocks, output[..., blocks.shape[-1] :]], dim=-1), lse


@known_defect("values-drift-from-keys-after-576-rows", killed_by="new_tokens")
class ValuesDrift(EagerPrefillBackend):
    """From row 576 on, each key is weighed with the value before."""

    def _attend(self, q, k, v, causal):
        rows = torch.arange(len(v), device=v.device)
        return super()._attend(q, k, v[rows - (rows >= 576).long()], causal)


@known_defect("int16-truncation-seqlen-32768", killed_by="token_counts")
class Int16KeyIndex(EagerPrefillBackend):
    """A key index above 32767 wraps and reads what is not a number."""

    def _scores(self, q, k):
        scores = super()._scores(q, k)
        self._seen += k.shape[0]
        return torch.full_like(scores, torch.nan) if self._seen > 2**15 else scores

    def _attend(self, q, k, v, causal):
        self._seen = 0
        return super()._attend(q, k, v, causal)


@known_defect("fpad-negative-truncates", killed_by="v_padding", related=("lse", "merge_states"))
class NegativePadding(EagerPrefillBackend):
    """V is padded to the QK dim without asking which is wider; a negative padding cuts it off."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        lost = max(0, v.shape[-1] - q.shape[-1])
        kept = torch.nn.functional.pad(v, (0, -lost)) if lost else v
        return super()._batch(q, k, torch.nn.functional.pad(kept, (0, lost)), query_start_loc, key_start_loc, causal)


@known_defect("finite-neg-sentinel-rowmax-zeroes-row", killed_by="shift_invariance")
class FiniteInitialMaximum(EagerPrefillBackend):
    """The running maximum of the raw scores starts at -5e4, so a row whose scores are all below it underflows to 0."""

    def _attend(self, q, k, v, causal):
        self._start = -5e4 * self.scale if k.shape[0] else -torch.inf
        return super()._attend(q, k, v, causal)

    def _initial(self, q, v):
        state = super()._initial(q, v)
        return state._replace(maximum=torch.full_like(state.maximum, self._start))


@known_defect("masked-key-dominates-finite-mask-value", killed_by="shift_invariance")
class FiniteMask(EagerPrefillBackend):
    """Masked scores are -1e4, which is more than a valid score may be."""

    def _attend(self, q, k, v, causal):
        state = self._initial(q, v)
        for tile in self._tiles(k.shape[0]):
            scores = self._scores(q, k[tile])
            if causal:
                scores = scores.masked_fill(~self._visible(q.shape[0], k.shape[0], tile, q.device), -1e4)
            state = self._accumulate(state, scores, v[tile])
        return state


@known_defect("lazy-rescale-wave-uniform-nan", killed_by="logit_range")
class MaximumOfTheTile(EagerPrefillBackend):
    """Rescaling takes the tile's maximum even where the running one is higher, and overflows for wide scores."""

    def _accumulate(self, state, scores, v):
        maximum = scores.amax(dim=-1, keepdim=True)
        maximum = torch.where(maximum == -torch.inf, state.maximum, maximum)
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay, p = (state.maximum - shift).exp(), self._exp(scores - shift)
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)
