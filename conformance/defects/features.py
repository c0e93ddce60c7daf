"""Features of a prefill that are declared supported and then fail, and state of it that outlives a call."""

from typing import ClassVar

import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.defects.bases import HopperE4M3Operands
from mla_conformance.defects.known import known_defect


@known_defect("cudnn-graph-cache-key-omits-strides", killed_by="call_order")
class GraphKeptItsStrides(EagerPrefillBackend):
    """A compiled graph is cached by shape and replays the strides that V had in the first call."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        self.__dict__.setdefault("graphs", {}).setdefault((q.shape, v.shape), v.stride())
        strides = self.graphs[q.shape, v.shape]
        offset = torch.full(v.shape, v.storage_offset())
        for size, stride, dim in zip(v.shape, strides, range(3), strict=True):
            offset += (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(3)])
        storage = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        return super().run_prefill_new_tokens(
            q, k, storage[offset % len(storage)], return_softmax_lse, out, output_scale
        )


@known_defect("tma-descriptor-cache-stale", killed_by="call_order")
class DescriptorOfAnAddress(EagerPrefillBackend):
    """A descriptor is cached by address; a hit reads what K was when it was made."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        # K is kept as well: its address is no other tensor's, and what dies of it is not the allocator's choice.
        _, was = self.__dict__.setdefault("descriptors", {}).setdefault((k.data_ptr(), k.shape), (k, k.clone()))
        return super().run_prefill_new_tokens(q, was, v, return_softmax_lse, out, output_scale)


@known_defect("prefill-pdl-chain-nan", killed_by="call_order")
class ReadsBeforeTheProducer(EagerPrefillBackend):
    """The first tile of K is read before its producer has written it: it is the previous call's."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        previous, self.previous = getattr(self, "previous", k), k.clone()
        if previous.shape == k.shape:
            k = torch.cat([previous[:16], k[16:]])
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


@known_defect("decode-mutates-prefill-selection-state", killed_by="call_order")
class ContextChangesTheKernel(EagerPrefillBackend):
    """A context chunk switches the implementation that the next call of new tokens uses."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        self.switched = True
        return super().run_prefill_context_chunk(chunk_idx, q, k, v)

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if getattr(self, "switched", False):
            v = v.roll(1, 0)
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


class _EveryNth(EagerPrefillBackend):
    """Counts the calls of new tokens and makes every n-th one wrong."""

    period: int

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        self.number = getattr(self, "number", 0) + 1
        if self.number % self.period == 0:
            k = self._stale(k)
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


@known_defect("q8kv8-prefill-stream-ordering", killed_by="determinism")
class UnorderedStreams(_EveryNth):
    """Now and then attention starts before the producer on another stream has finished with K."""

    period = 11

    def _stale(self, k):
        return torch.cat([torch.zeros_like(k[:5]), k[5:]])


@known_defect("cp-async-wait-without-block-barrier-quant-kv", killed_by="determinism")
class MissingBarrier(_EveryNth):
    """Without a barrier, later tiles of K are now and then those of the tile before."""

    period = 8

    def _stale(self, k):
        return torch.cat([k[:128], k[: max(0, k.shape[0] - 128)]])[: k.shape[0]]


@known_defect("prefill-metadata-stashed-on-shared-backend", killed_by="call_order")
class SharedMetadata(EagerPrefillBackend):
    """Metadata are kept where all instances find them, so that a batch runs with those of the batch built last."""

    stashed: ClassVar[MLACommonPrefillMetadata]

    def prepare_metadata(self, prefill_metadata):
        SharedMetadata.stashed = prefill_metadata
        super().prepare_metadata(prefill_metadata)

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if causal:
            query_start_loc = key_start_loc = self.stashed.query_start_loc.tolist()
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("prefill-backend-pins-cutlass-unsupported-dims", killed_by="mla_dims")
class NoKernelForGlm(EagerPrefillBackend):
    """GLM's head dims are declared supported, and the dispatch table lacks them."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if v.shape[-1] == 256:
            raise RuntimeError("no kernel for head dims (256, 256)")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("trtllm-gen-missing-cubin-after-selection", killed_by="mla_dims")
class MissingCubin(EagerPrefillBackend):
    """Selection accepts head dims for which no binary was shipped."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if (self.qk_nope_head_dim, self.qk_rope_head_dim) == (64, 64):
            raise RuntimeError("missing cubin")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("nope-mla-rotary-none-crash", killed_by="mla_dims")
class NeedsRotary(EagerPrefillBackend):
    """A model without RoPE has no rotary embedding, and the backend asks it for one."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self.qk_rope_head_dim == 0:
            raise AttributeError("'NoneType' object has no attribute 'cos_sin_cache'")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("missing-template-instantiation", killed_by="head_counts")
class NoInstanceForTwentyHeads(EagerPrefillBackend):
    """One number of heads has no template instance."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self.num_heads == 20:
            raise RuntimeError("no template instance for 20 heads")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("ragged-sm90-ima-total-16384", killed_by="token_counts")
class Beyond16384Tokens(EagerPrefillBackend):
    """A batch of 16,384 tokens or more reads out of bounds."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if query_start_loc[-1] >= 2**14:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("tma-short-tail-descriptor-flag", killed_by="new_tokens")
class ShortTail(EagerPrefillBackend):
    """A long request followed by a tail of one token fails: the tail's descriptor keeps a stale flag."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if causal and query_start_loc[-1] > 256 and query_start_loc[-1] - query_start_loc[-2] == 1:
            raise RuntimeError("CUDA error: misaligned address")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("tma-odd-stride-illegal", killed_by="strided_inputs")
class OddStrides(EagerPrefillBackend):
    """A row stride that is no multiple of 16 bytes cannot be described, and is not checked for."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if any(x.stride(1) * x.element_size() % 16 for x in (q, k, v)):
            raise RuntimeError("failed to initialise the TMA descriptor")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("merge-both-neg-inf-nan", killed_by="merge_states")
class UnguardedMerge(EagerPrefillBackend):
    """Two rows without keys are merged with exp(-inf - -inf), which is not a number."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        largest = torch.maximum(prefix_lse, suffix_lse)
        weights = [(part - largest).exp() for part in (prefix_lse, suffix_lse)]
        total = weights[0] + weights[1]
        shares = [(weight / total).mT.unsqueeze(-1) for weight in weights]
        output.copy_(shares[0] * prefix_output.float() + shares[1] * suffix_output.float())
        if output_lse is not None:
            output_lse.copy_(largest + total.log())


class _Merge(EagerPrefillBackend):
    """Both weights as a merge computes them, 0 where neither part has a key."""

    def _weight(self, lse: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return (lse - largest.masked_fill(largest == -torch.inf, 0.0)).exp().mT.unsqueeze(-1)


@known_defect("merge-weighs-a-keyless-output-with-zero", killed_by="merge_states")
class ZeroTimesNoNumber(_Merge):
    """The output of a row without keys is weighed with 0, not cleared, and 0 times NaN is NaN."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        merged = torch.logaddexp(prefix_lse, suffix_lse)
        weights = [self._weight(part, merged) for part in (prefix_lse, suffix_lse)]
        output.copy_(weights[0] * prefix_output.float() + weights[1] * suffix_output.float())
        if output_lse is not None:
            output_lse.copy_(merged)


@known_defect("merge-writes-lse-before-it-is-read", killed_by="merge_states")
class LseBeforeWeights(_Merge):
    """The merged LSE is written before the weights are computed, from the prefix's, which may be the same tensor."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        merged = torch.logaddexp(prefix_lse, suffix_lse)
        if output_lse is not None:
            output_lse.copy_(merged)
        weights = [self._weight(part, merged) for part in (prefix_lse, suffix_lse)]
        output.copy_(weights[0] * prefix_output.float() + weights[1] * suffix_output.float())


@known_defect("merge-clears-its-output-first", killed_by="merge_states")
class ClearsItsOutput(_Merge):
    """The output is cleared before both parts are added to it, the prefix too where that is the same tensor."""

    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        merged, sums = torch.logaddexp(prefix_lse, suffix_lse), torch.zeros_like(output, dtype=torch.float32)
        output.zero_()
        for part, lse in ((prefix_output, prefix_lse), (suffix_output, suffix_lse)):
            sums += self._weight(lse, merged) * part.float()
        output.copy_(sums)
        if output_lse is not None:
            output_lse.copy_(merged)


@known_defect("hopper-fp8-accumulator-keeps-13-bits", killed_by="fp8_operands")
class AccumulatesIn22Bits(HopperE4M3Operands):
    """Sums of e4m3 products keep 13 bits behind the point where float32 is declared."""

    declaration = Declaration(e4m3_rounding=Rounding(p=Precision.SCALED_E4M3), emulated=True)


@known_defect("e4m3fn-codes-read-as-e4m3fnuz", killed_by="fp8_operands", related=("quant_output_fp8",))
class ReadsFnuzCodes(EagerPrefillBackend):
    """Codes of e4m3fn are read as e4m3fnuz: half of each value, and -0 is NaN."""

    def _widened(self, x):
        return super()._widened(x.view(torch.float8_e4m3fnuz) if x.dtype == torch.float8_e4m3fn else x)
