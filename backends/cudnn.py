"""CUDNN: cuDNN's fused attention, by the frontend's graph API (``graph``) or by FlashInfer's entry (``flashinfer``)."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch, aligned, blank_lse, blank_output, rows_that_count
from mla_conformance.backends.cudnn_graph import CUDNN, Key, execute, lengths, offsets
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.flashinfer import FLASHINFER, WORKSPACE_BYTES
from mla_conformance.backends.platform import FROM_HOPPER, Devices
from mla_conformance.backends.ragged import RaggedPrefillBackend
from mla_conformance.reference.dimensions import MLADimensions

ALIGNED = Deviation("operands must start at multiples of 16 bytes", "others are copied")
OFFSETS = Deviation("lengths and element offsets instead of token offsets", "computed on the device, int64")
_EMPTY = Deviation("output and LSE of a row without keys are undefined", "0 and -inf where the lengths say so")
_FP8_NODE = Deviation("Hopper's node for e4m3 operands writes e4m3 codes only", "left to the variant fp8")


class CudnnPrefillBackend(RaggedPrefillBackend):
    """The family: the graph API, or FlashInfer's entry where only that is asked for."""

    name: ClassVar[str] = "CUDNN"
    devices: ClassVar[Devices] = FROM_HOPPER  # which ragged operands need

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Multiples of 8 columns, at most 256."""
        widths = (dimensions.qk_head_dim, dimensions.v_head_dim)
        return max(widths) <= 256 and not any(width % 8 for width in widths)

    def kernel_evidence(self) -> dict[str, str]:
        """Versions of the packages and of the library that the frontend loaded."""
        return {**super().kernel_evidence(), "cudnn": str(CUDNN.load().backend_version())}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        q, k, v = (aligned(x) for x in (q, k, v))
        direct = out is not None and out.is_contiguous() and aligned(out) is out
        output = out if out is not None and direct else q.new_empty(q.shape[0], self.num_heads, self.v_head_dim)
        lse = self._kernel(q, k, v, output, batch)
        return blank_output(output, batch), blank_lse(lse, batch)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        """Write ``output`` [T, N, V], packed; return the LSE [N, T]."""
        raise NotImplementedError(f"CUDNN is a family of kernels: choose one of {', '.join(self.variants)}")


class CudnnGraph(CudnnPrefillBackend, variant="graph"):
    """One graph of the frontend a shape."""

    libraries: ClassVar[tuple[Library, ...]] = (CUDNN,)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("nvidia-cudnn-frontend", "nvidia-cudnn-cu13"), deviations=(_EMPTY, OFFSETS, ALIGNED, _FP8_NODE)
    )

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        lse = q.new_empty(q.shape[0], self.num_heads, dtype=torch.float32)
        tensors = {"q": q, "k": k, "v": v, "o": output, "stats": lse}
        self._served = {"plan": execute(Key.of(q, k, v, batch, self.scale), tensors, batch)}
        return lse.mT


class CudnnByFlashInfer(CudnnPrefillBackend, variant="flashinfer"):
    """``flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache``."""

    libraries: ClassVar[tuple[Library, ...]] = (FLASHINFER, CUDNN)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("flashinfer-python", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13"),
        deviations=(
            _EMPTY,
            OFFSETS,
            ALIGNED,
            Deviation("LSE padded to [B, longest, N]", "the rows that count are gathered"),
            Deviation("LSE natural in 0.6.13, base 2 by default in 0.7.2", "0.7.2 is asked for the natural one"),
        ),
    )

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """The pairs that its documentation gives."""
        return (dimensions.qk_head_dim, dimensions.v_head_dim) in ((192, 128), (128, 128))

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        entry = FLASHINFER.load().cudnn.cudnn_batch_prefill_with_kv_cache
        natural: dict[str, Any] = {"lse_base": "ln"} if "lse_base" in inspect.signature(entry).parameters else {}
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        options = {"causal": batch.causal, "return_lse": True, "out": output, **natural}
        _, padded = entry(q, k, v, self.scale, workspace, **_places(q, k, v, output, batch), **options)
        return rows_that_count(padded, batch)


def _places(q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> dict[str, Any]:
    """Lengths and offsets as keywords of FlashInfer's entry."""
    queries, keys = batch.query_start_loc, batch.key_start_loc
    return {
        "max_token_per_sequence": batch.max_query_len,
        "max_sequence_kv": batch.max_key_len,
        "actual_seq_lens_q": lengths(queries),
        "actual_seq_lens_kv": lengths(keys),
        "batch_offsets_q": offsets(queries, q.stride(0)),
        "batch_offsets_o": offsets(queries, output.stride(0)),
        "batch_offsets_k": offsets(keys, k.stride(0)),
        "batch_offsets_v": offsets(keys, v.stride(0)),
    }
