"""What a request's NaN does to the others of its batch, and what a batch leaves behind for the next one."""

from typing import ClassVar

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect


class _RunsOn(EagerPrefillBackend):
    """The last tile of a request's keys is filled up with those of the requests behind it, which are then masked."""

    declaration = Declaration(distributions=("torch",), emulated=True)

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        self._keys, self._values = (self._widened(x[: key_start_loc[-1]]) for x in (k, v))
        self._end = 0
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)

    def _attend(self, q, k, v, causal):
        self._end += k.shape[0]
        return super()._attend(q, k, v, causal)

    def _accumulate(self, state, scores, v):
        missing = min(self.key_tile - v.shape[0], len(self._keys) - self._end)
        behind = slice(self._end, self._end + missing)
        return super()._accumulate(state, self._filled(scores, behind), torch.cat([v, self._values[behind]]))

    def _scores(self, q, k):
        self._q = q
        return super()._scores(q, k)


@known_defect("prefill-tile-weighs-neighbours-values-with-zero", killed_by="neighbour_keys")
class ZeroTimesTheNeighbour(_RunsOn):
    """The last tile of a request's values runs into the next request, whose values are weighed with 0, not cleared."""

    def _filled(self, scores, behind):
        return torch.nn.functional.pad(scores, (0, behind.stop - behind.start), value=-torch.inf)


@known_defect("prefill-additive-mask-keeps-neighbours-nan", killed_by="neighbour_keys")
class AddedMask(_RunsOn):
    """The next request's keys in a tile are masked by adding -inf to their scores, which leaves NaN what it is."""

    def _filled(self, scores, behind):
        return torch.cat([scores, self._scores(self._q, self._keys[behind]) - torch.inf], dim=-1)


@known_defect("decode-last-tile-of-pages-weighs-neighbours-entries-with-zero", killed_by="neighbour_keys")
class PagesOfTheNext(EagerDecodeBackend):
    """A decode's last tile is filled up with entries of the next request, which are weighed with 0, not cleared."""

    def _over(self, tiles, q, request, seq_len, kv_cache, k_scale):
        state = super()._over(tiles, q, request, seq_len, kv_cache, k_scale)
        following = request + 1
        lengths = self._decode_metadata.seq_lens
        if following == len(lengths) or not seq_len % self.key_tile:
            return state
        first = slice(0, min(self.key_tile - seq_len % self.key_tile, int(lengths[following])))
        rows = self._dequantise(self._entries(kv_cache, following, first), k_scale)
        leaked = (0.0 * self._values(rows)).sum(dim=0)
        return state._replace(weighted=state.weighted + leaked)


class _OneAfterAnother(EagerPrefillBackend):
    """A persistent block computes the requests of a batch one after the other."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        self._before = None
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)

    def _attend(self, q, k, v, causal):
        self._before = super()._attend(q, k, v, causal)
        return self._before


@known_defect("prefill-accumulator-cleared-by-multiplication", killed_by="neighbours")
class ClearedByMultiplication(_OneAfterAnother):
    """Between two requests the accumulator is multiplied by 0, which clears every number but no NaN."""

    def _initial(self, q, v):
        state = super()._initial(q, v)
        if self._before is None or not self._before.weighted.numel():
            return state
        return state._replace(weighted=state.weighted + 0.0 * self._before.weighted.amax())


@known_defect("prefill-query-scale-over-the-batch", killed_by="neighbours")
class ScaleOfAllQueries(EagerPrefillBackend):
    """Queries are divided by a power of two near the largest of the whole batch before they are multiplied."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        largest = (
            q[: query_start_loc[-1]].float().abs().amax()
            if query_start_loc[-1]
            else q.new_ones((), dtype=torch.float32)
        )
        self._range = largest.clamp(min=1.0).log2().floor().exp2()
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)

    def _scores(self, q, k):
        return super()._scores(q.float() / self._range, k) * self._range


@known_defect("prefill-nan-guard-over-the-batch", killed_by="neighbours")
class AllOrNothing(EagerPrefillBackend):
    """Where any row of the batch is not finite, all rows are taken for rows without keys."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        if output.isfinite().all():
            return output, lse
        return torch.zeros_like(output), torch.full_like(lse, -torch.inf)


@known_defect("decode-nan-guard-over-the-batch", killed_by="neighbours")
class BatchWithoutKeys(EagerDecodeBackend):
    """Where any row of a decode is not finite, the whole batch is taken for one of padding."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        if output.isfinite().all():
            return output, lse
        return torch.zeros_like(output), torch.full_like(lse, -torch.inf)


@known_defect("decode-maximum-over-the-batch", killed_by="neighbours")
class OneMaximum(EagerDecodeBackend):
    """Scores are checked against the largest of all requests so far, and one that is not below it ends the batch."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self._ended = False
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, 0 if self._ended else seq_len, kv_cache, k_scale)
        self._ended = self._ended or not bool((state.maximum < torch.inf).all())
        return state


def _ends(lengths: list[int]) -> tuple[int, ...]:
    """What a plan is found by: requests, tokens, the first length and the last."""
    return len(lengths), sum(lengths), lengths[0], lengths[-1]


@known_defect("prefill-plan-key-has-ends-only", killed_by="request_order")
class PlanByItsEnds(EagerPrefillBackend):
    """A plan is found again by the number of requests, of tokens, and the first and last length of the batch."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if causal:
            key = _ends(torch.tensor(query_start_loc).diff().tolist())
            query_start_loc = self.__dict__.setdefault("plans", {}).setdefault(key, query_start_loc)
            key_start_loc = query_start_loc
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("decode-plan-key-has-ends-only", killed_by="request_order")
class DecodePlanByItsEnds(EagerDecodeBackend):
    """A decode's plan is found again by the number of requests, of tokens, and the first and last length."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        lengths = self._decode_metadata.seq_lens.tolist()
        key = (self._decode_metadata.dcp_rank, *_ends(lengths))
        planned = self.__dict__.setdefault("plans", {}).setdefault(key, lengths)
        return super()._attend(q, request, min(seq_len, planned[request]), kv_cache, k_scale)


@known_defect("prefill-workspace-of-the-first-batch", killed_by="call_order")
class RoomOfTheFirstBatch(EagerPrefillBackend):
    """Buffers for the lengths are made for the first batch, and a later one loses the requests that do not fit."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        room = self.__dict__.setdefault("room", len(query_start_loc) + 1)
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        output[query_start_loc[:room][-1] :] = 0.0
        return output, lse


@known_defect("decode-workspace-of-the-first-batch", killed_by="call_order")
class DecodeRoomOfTheFirstBatch(EagerDecodeBackend):
    """A decode's buffers are made for the first batch and one request more, and the further ones find no sequence."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        room = self.__dict__.setdefault("room", len(self._decode_metadata.seq_lens) + 1)
        return super()._attend(q, request, seq_len if request < room else 0, kv_cache, k_scale)


@known_defect("prefill-single-request-path-stays", killed_by="call_order")
class StaysWithOne(EagerPrefillBackend):
    """A batch of one request switches to a grid for one, which later batches of several keep."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        self.single = getattr(self, "single", False) or len(query_start_loc) == 2
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        if self.single:
            output[query_start_loc[1] :] = 0.0
        return output, lse


@known_defect("decode-single-request-path-stays", killed_by="call_order")
class DecodeStaysWithOne(EagerDecodeBackend):
    """A decode of one request switches to a grid for one, which later batches of several keep."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        self.single = getattr(self, "single", False) or len(self._decode_metadata.seq_lens) == 1
        seen = 0 if self.single and request else seq_len
        return super()._attend(q, request, seen, kv_cache, k_scale)


@known_defect("prefill-softmax-scale-in-shared-constant", killed_by="call_order")
class ScaleOfTheLastInstance(EagerPrefillBackend):
    """The softmax scale is a constant of the module, and every new instance overwrites it for all."""

    constant: ClassVar[float]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        ScaleOfTheLastInstance.constant = self.scale

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * self.constant


@known_defect("decode-softmax-scale-in-shared-constant", killed_by="call_order")
class DecodeScaleOfTheLastInstance(EagerDecodeBackend):
    """A decode's softmax scale is a constant of the module, and every new instance overwrites it for all."""

    constant: ClassVar[float]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        DecodeScaleOfTheLastInstance.constant = self.scale

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * self.constant


@known_defect("decode-k-scale-kept-by-cache-address", killed_by="call_order")
class ScaleOfACache(EagerDecodeBackend):
    """``k_scale`` is read once for each cache, found by its address, although every call hands it over."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        known = self.__dict__.setdefault("known", {})  # with the cache, so that no other one gets its address
        _, kept = known.setdefault((kv_cache.data_ptr(), kv_cache.shape), (kv_cache, k_scale.clone()))
        return super().run_decode(ql_nope, q_pe, kv_cache, kept)
