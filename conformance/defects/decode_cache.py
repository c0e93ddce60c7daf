"""Codes that are read as other numbers: scales that are ignored, taken from elsewhere, or rounded."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.e8m0 import through_e8m0
from mla_conformance.defects.known import known_defect


@known_defect(
    "cutlass-mla-claims-fp8-without-scales",
    killed_by="kv_cache_fp8",
    sources=("vllm-project/vllm#37054",),
)
class ScalesIgnored(EagerDecodeBackend):
    """Codes are read as values: the scale of the cache is not used."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, torch.ones_like(k_scale))


@known_defect(
    "fp8-mla-k-scale-vs-v-scale-inconsistent",
    killed_by="kv_cache_fp8",
    sources=(
        "vllm-project/vllm#37054",
        "sgl-project/sglang#34765",
    ),
)
class ValuesByAnotherScale(EagerDecodeBackend):
    """A latent is a key by the key's scale and a value by the value's, which nobody has set: it is 1."""

    def _dequantise(self, rows, k_scale):
        self._descale = k_scale if self.kv_cache_dtype == "fp8" else 1.0
        return super()._dequantise(rows, k_scale)

    def _values(self, keys):
        return super()._values(keys) / self._descale


@known_defect(
    "trtllm-mha-fp8-q-without-qscale",
    killed_by="kv_cache_fp8",
    sources=("sgl-project/sglang#28144",),
)
class QueriesWithoutScale(EagerDecodeBackend):
    """Beside a cache of codes the queries become codes themselves, without a scale."""

    def _scores(self, q, k):
        codes = q.float().clamp(-448, 448).to(torch.float8_e4m3fn) if self.kv_cache_dtype == "fp8" else q
        return super()._scores(codes, k)


@known_defect(
    "fp8-compile-cache-folds-unit-scale",
    killed_by="call_order",
    sources=("local-inference-lab/b12x#63",),
)
class FoldedScale(EagerDecodeBackend):
    """A kernel that was compiled while the scale was 1 has no multiplication, and its key does not say so."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        folded = self.__dict__.setdefault("compiled", {}).setdefault(ql_nope.shape, bool(k_scale == 1))
        return super().run_decode(ql_nope, q_pe, kv_cache, torch.ones_like(k_scale) if folded else k_scale)


@known_defect(
    "fp8-ds-mla-float-scale-read-as-e8m0",
    killed_by="kv_cache_fp8_ds_mla",
    sources=("deepseek-ai/FlashMLA#184",),
)
class ScalesToPowersOfTwo(EagerDecodeBackend):
    """The float32 scales of a mixed entry pass through e8m0, which holds powers of two."""

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(through_e8m0(rows) if self.kv_cache_dtype == "fp8_ds_mla" else rows, k_scale)
