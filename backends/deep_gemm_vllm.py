"""DEEPGEMM_INDEXER[vllm]: DeepGEMM as the wheel of vLLM carries it, which calls torch by its stable interface alone.

Written for vLLM 0.33.0 with DeepGEMM 2.8.1, as ``vllm/utils/deep_gemm.py`` calls it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.deep_gemm import DeepGemmIndexerBackend
from mla_conformance.backends.dependencies import Library, extra

_LIBRARY = Library("vllm.third_party.deep_gemm", "vllm", extra("vllm"), "it compiles at the first call and needs nvcc")
_ALONE = "a paged call takes 1, 2 or 4 query tokens of every request"


class DeepGemmIndexerVllm(DeepGemmIndexerBackend):
    """Queries come with their scales, of which those in e4m3 have none."""

    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    variant: ClassVar[str] = "vllm"
    clusters: ClassVar[Mapping[int, int]] = MappingProxyType({1: 1, 2: 1, 4: 2})
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("vllm", "torch"),
        rounding=DeepGemmIndexerBackend.declaration.rounding,
        deviations=(
            Deviation(_ALONE, "others become requests of one each"),
            *DeepGemmIndexerBackend.declaration.deviations[1:],
        ),
    )

    def _query(self, q: Tensor) -> Any:
        return q, None
