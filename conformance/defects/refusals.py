"""Refusals that come too late, or leave traces."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect


@known_defect("refusal-after-the-output-was-cleared", killed_by="refusals")
class ClearsBeforeItRefuses(EagerPrefillBackend):
    """The output tensor is cleared before anybody looks at what was asked for."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if out is not None:
            out.zero_()
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


@known_defect("refusal-leaves-the-default-dtype", killed_by="refusals")
class LeavesItsDtype(EagerPrefillBackend):
    """The default dtype is set for the call, and not put back where the call is refused."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        result = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        torch.set_default_dtype(before)
        return result


@known_defect("decode-refusal-leaves-gradients-off", killed_by="refusals")
class LeavesGradientsOff(EagerDecodeBackend):
    """A decode turns gradients off, and not on again where it is refused."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        torch.set_grad_enabled(before)
        return result
