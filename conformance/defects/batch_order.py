"""What a batch leaves behind for the next one on the same instance: plans by incomplete keys, sizes, scales."""

from typing import ClassVar

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect


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
