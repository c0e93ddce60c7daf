"""Configurations of decode that are declared supported and then fail."""

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect


@known_defect(
    "mistral4-triton-mla-latent-dims-hardcoded",
    killed_by="decode",
    sources=("vllm-project/vllm#40260",),
)
class LatentsOf512(EagerDecodeBackend):
    """The tile of a latent is hard-wired to 512 columns, and other models do not compile."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if self.kv_lora_rank != 512:
            raise RuntimeError(f"arange's range must be a power of two: 512 + 64 columns for L = {self.kv_lora_rank}")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


@known_defect(
    "aiter-qh64-pagesize1-fault",
    killed_by="paged_cache",
    sources=("ROCm/aiter#4365",),
)
class SinglePages(EagerDecodeBackend):
    """With pages of one token, a batch of 16 requests or more reads out of bounds."""

    def _entries(self, kv_cache, request, tile):
        if kv_cache.shape[1] == 1 and self._decode_metadata.seq_lens.shape[0] >= 16:
            raise RuntimeError("memory access fault: page not present")
        return super()._entries(kv_cache, request, tile)


@known_defect(
    "aiter-no-kernel-bf16q-fp8kv-qlen5",
    killed_by="kv_cache_fp8",
    sources=("ROCm/aiter#4752",),
)
class FourTokensBesideCodes(EagerDecodeBackend):
    """Beside a cache of codes there is no kernel for more than four query tokens."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if self.kv_cache_dtype == "fp8" and q.shape[0] > 4:
            raise RuntimeError(f"no kernel for 16-bit queries, codes and {q.shape[0]} query tokens")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)
