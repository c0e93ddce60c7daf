"""What is planned for one batch, one layer or a dozen batches, and serves others."""

from typing import Any, ClassVar

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.defects.known import known_defect

_DOZEN = 12


@known_defect("prefill-plans-of-a-dozen-batches", killed_by="call_order")
class DozenPlans(EagerPrefillBackend):
    """An instance has room for the plans of a dozen batches, and of every further one the last request is lost."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        plans = self.__dict__.setdefault("plans", [])
        if causal and query_start_loc not in plans:
            plans.append(query_start_loc)
        if causal and query_start_loc not in plans[:_DOZEN]:
            output[query_start_loc[-2] :] = 0.0
        return output, lse


@known_defect("decode-plans-of-a-dozen-batches", killed_by="call_order")
class DecodeDozenPlans(EagerDecodeBackend):
    """A cache of a dozen plans is full, and a further decode runs with the plan that was stored last."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        lengths, plans = self._decode_metadata.seq_lens.tolist(), self.__dict__.setdefault("plans", [])
        if lengths not in plans and len(plans) < _DOZEN:
            plans.append(lengths)
        planned = lengths if lengths in plans else plans[-1]
        seen = min(seq_len, planned[request]) if request < len(planned) else 0
        return super()._attend(q, request, seen, kv_cache, k_scale)


@known_defect("prefill-work-counter-cleared-by-the-plan", killed_by="call_order")
class CounterOfThePlan(EagerPrefillBackend):
    """Planning a batch clears the counter of its work, and a second layer finds the last request done already."""

    def prepare_metadata(self, prefill_metadata):
        self._done = False
        super().prepare_metadata(prefill_metadata)

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        result = super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        if self._done:
            output = result[0] if return_softmax_lse else result
            output[int(self._prefill_metadata.query_start_loc[-2]) :] = 0.0
        self._done = True
        return result


@known_defect("decode-gathers-pages-once-for-a-plan", killed_by="call_order")
class PagesOfThePlan(EagerDecodeBackend):
    """A batch's pages are gathered at its first decode, and the other layers of the step read those of the first."""

    def prepare_metadata(self, decode_metadata):
        self._gathered = None
        super().prepare_metadata(decode_metadata)

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self._gathered = kv_cache.clone() if self._gathered is None else self._gathered
        return super().run_decode(ql_nope, q_pe, self._gathered, k_scale)


class _FoundByMetadata(MLACommonImpl):
    """Takes the weights of the layer that was handed the metadata first."""

    owner: ClassVar[tuple[Any, Any]] = (None, None)

    def forward(self, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, **outputs):
        known, first = _FoundByMetadata.owner
        if known is not attn_metadata:
            _FoundByMetadata.owner = (attn_metadata, self)
        elif first is not self:
            self.W_UK_T, self.W_UV = first.W_UK_T, first.W_UV
        return super().forward(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, **outputs)


@known_defect("layer-weights-found-by-the-metadata", killed_by="call_order")
class WeightsOfTheFirstLayer(EagerLayer):
    """Absorbed weights are found by the step's metadata, and its second layer decodes with those of the first."""

    impl_class = _FoundByMetadata
