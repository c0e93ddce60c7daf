"""The abstract MLA prefill backend: names and keywords of vLLM's ``v1.attention.backends.mla.prefill.base``."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.kernel import AttentionSizes, KernelBackend, UnsupportedConfiguration
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.operands import Form, require_forms, table
from mla_conformance.reference.dimensions import MLADimensions

__all__ = ["MLADimensions", "MLAPrefillBackend", "MLAPrefillSelectorConfig", "UnsupportedConfiguration"]


class ScaleDesc(NamedTuple):
    """A scale's dtype, whether it is known before the call (static), and how many rows and columns it covers."""

    dtype: torch.dtype
    static: bool
    group_shape: tuple[int, int]  # -1 is the whole axis


class QuantKey(NamedTuple):
    """Stored dtype, scale and symmetry of a quantised tensor; symmetric means no zero point."""

    dtype: torch.dtype
    scale: ScaleDesc
    symmetric: bool = True


def fp8_static_tensor_sym() -> QuantKey:
    """Key ``kFp8StaticTensorSym``: e4m3 codes of value / scale, one static float32 scale for the tensor."""
    return QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, static=True, group_shape=(-1, -1)))


class MLAPrefillSelectorConfig(NamedTuple):
    dtype: torch.dtype
    mla_dimensions: MLADimensions


class PrefillKernelBackend(KernelBackend, AttentionSizes):
    """What prepares metadata on the instance, of any generation: T query tokens, S keys, N heads; P, R, V head dims."""

    supported_mla_dimensions: ClassVar[list[MLADimensions]] = []  # head dims; empty means any
    writes_e4m3: ClassVar[bool] = False  # whether ``out`` may be e4m3 under one static scale for the tensor
    returns_lse: ClassVar[bool] = True  # whether an LSE can be asked for; without it there are no context chunks either

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        return not cls.supported_mla_dimensions or dimensions in cls.supported_mla_dimensions

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        """Whether ``run_prefill_new_tokens`` writes ``out`` quantised by ``quant_key`` itself (fused)."""
        return self.writes_e4m3 and quant_key == fp8_static_tensor_sym()

    @classmethod
    def supports_unquantised_output(cls, dtype: torch.dtype) -> bool:
        """Whether operands of ``dtype`` may have an output that is not quantised; a kernel may write codes only."""
        return True

    @classmethod
    def _reasons(cls, config: MLAPrefillSelectorConfig) -> Iterator[str]:
        if not cls.supports_mla_dimensions(config.mla_dimensions):
            supported = ", ".join(map(str, cls.supported_mla_dimensions))
            listing = f" (supported: {supported})" if supported else ""
            yield f"MLA dimensions {config.mla_dimensions} not supported{listing}"

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Take the metadata of the next calls, of the generation's own class; called once per batch."""
        self._prefill_metadata = prefill_metadata

    @abstractmethod
    @table
    def run_prefill_new_tokens(
        self,
        q: Annotated[Tensor, Form("T or more, N, P + R")],  # rope applied
        k: Annotated[Tensor, Form("S or more, N, P + R")],
        v: Annotated[Tensor, Form("S or more, N, V")],  # any strides
        return_softmax_lse: bool,
        out: Annotated[Tensor | None, Form("T, N, V", written=True)] = None,
        output_scale: Annotated[Tensor | None, Form("", torch.float32)] = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention among each request's new tokens: output [T, N, V], and if asked lse [N, T] float32, natural.

        The returned tensor shares the storage of ``out``, which is e4m3 where an ``output_scale`` is given, and
        receives the codes of value / output_scale.
        """


class MLAPrefillBackend(PrefillKernelBackend):
    """Prefill attention over up-projected keys and values: the generation that this project is written in."""

    _prefill_metadata: MLACommonPrefillMetadata

    @abstractmethod
    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Unmasked attention of the new tokens to one chunk of cached context, keys of all requests end to end.

        Returns (output [T, N, V], lse [N, T] float32, natural logarithm); a row without keys is 0 and -inf.
        """


def check_operands(
    backend: PrefillKernelBackend, q: Tensor, k: Tensor, v: Tensor, query_tokens: int, key_tokens: int
) -> None:
    """Refuse operands that the backend does not declare, or with fewer rows than the metadata counts."""
    for dtype in {operand.dtype for operand in (q, k, v)}:
        if not backend.supports_dtype(dtype):
            said = f"dtype {dtype} not supported (supported: {', '.join(map(str, backend.supported_dtypes))})"
            raise UnsupportedConfiguration(f"{backend.get_name()}: {said}")
    if not backend.supports_mla_dimensions(backend.dimensions):
        raise UnsupportedConfiguration(f"{backend.get_name()}: MLA dimensions {backend.dimensions} not supported")
    widths = {"P + R": backend.dimensions.qk_head_dim, "V": backend.v_head_dim}
    known = {"T": query_tokens, "S": key_tokens, "N": backend.num_heads, **widths}
    require_forms(PrefillKernelBackend.run_prefill_new_tokens, (q, k, v), known)


def check_unquantised(backend: PrefillKernelBackend, output_scale: Tensor | None) -> None:
    """Refuse an output scale, by UnsupportedConfiguration, in a backend without quantised output."""
    if output_scale is not None and not backend.supports_quant_output(fp8_static_tensor_sym()):
        raise UnsupportedConfiguration(
            f"{backend.get_name()}: quantised output not supported; quantise the result of a call without output_scale"
        )
