"""Configurations that are declared supported and then fail."""

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect


@known_defect(
    "prefill-backend-pins-cutlass-unsupported-dims",
    killed_by="mla_dims",
    sources=(
        "vllm-project/vllm#57217",
        "vllm-project/vllm#43525",
        "vllm-project/vllm#37475",
        "vllm-project/vllm#48855",
    ),
)
class NoKernelForGlm(EagerPrefillBackend):
    """GLM's head dims are declared supported, and the dispatch table lacks them."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if v.shape[-1] == 256:
            raise RuntimeError("no kernel for head dims (256, 256)")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect(
    "trtllm-gen-missing-cubin-after-selection",
    killed_by="mla_dims",
    sources=("vllm-project/vllm#48082",),
)
class MissingCubin(EagerPrefillBackend):
    """Selection accepts head dims for which no binary was shipped."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if (self.qk_nope_head_dim, self.qk_rope_head_dim) == (64, 64):
            raise RuntimeError("missing cubin")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect(
    "nope-mla-rotary-none-crash",
    killed_by="mla_dims",
    sources=("sgl-project/sglang#38158",),
)
class NeedsRotary(EagerPrefillBackend):
    """A model without RoPE has no rotary embedding, and the backend asks it for one."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self.qk_rope_head_dim == 0:
            raise AttributeError("'NoneType' object has no attribute 'cos_sin_cache'")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect(
    "missing-template-instantiation",
    killed_by="head_counts",
    sources=(
        "flashinfer-ai/flashinfer#3828",
        "flashinfer-ai/flashinfer#5135",
    ),
)
class NoInstanceForTwentyHeads(EagerPrefillBackend):
    """One number of heads has no template instance."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self.num_heads == 20:
            raise RuntimeError("no template instance for 20 heads")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect(
    "ragged-sm90-ima-total-16384",
    killed_by="token_counts",
    sources=("flashinfer-ai/flashinfer#1419",),
)
class Beyond16384Tokens(EagerPrefillBackend):
    """A batch of 16,384 tokens or more reads out of bounds."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if query_start_loc[-1] >= 2**14:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect(
    "tma-short-tail-descriptor-flag",
    killed_by="new_tokens",
    sources=("NVIDIA/cudnn-frontend#1015",),
)
class ShortTail(EagerPrefillBackend):
    """A long request followed by a tail of one token fails: the tail's descriptor keeps a stale flag."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if causal and query_start_loc[-1] > 256 and query_start_loc[-1] - query_start_loc[-2] == 1:
            raise RuntimeError("CUDA error: misaligned address")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect(
    "tma-odd-stride-illegal",
    killed_by="strided_inputs",
    sources=("flashinfer-ai/flashinfer#2274",),
)
class OddStrides(EagerPrefillBackend):
    """A row stride that is no multiple of 16 bytes cannot be described, and is not checked for."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if any(x.stride(1) * x.element_size() % 16 for x in (q, k, v)):
            raise RuntimeError("failed to initialise the TMA descriptor")
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
