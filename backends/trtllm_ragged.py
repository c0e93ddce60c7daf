"""TRTLLM_RAGGED: TensorRT-LLM's ragged prefill kernels for Blackwell, called through FlashInfer.

``trtllm_ragged_attention_deepseek`` of FlashInfer 0.6.13 and 0.7.2. The package tensorrt-llm on PyPI is a stub that
downloads from another index; it is not needed.

The attention of tensorrt_llm itself has no adapter and no recorded signature. Of 1.2.1 the index has a source archive
of 10 kB, whose build fetches the wheel from elsewhere, so that CI could compare nothing. And no call of it is handed a
cache: ``TrtllmAttentionWrapper.run`` (NVIDIA/TensorRT-LLM at 9144c0e6, ``_torch/attention_backend/trtllm.py``) passes
``thop.attention``, a function in C++ of 66 arguments, the addresses of pools that the engine's cache manager allocates
(``host_kv_cache_pool_pointers``), beside the step's latents and the tables of its rotation.
"""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch, aligned, blank_lse, blank_output, natural_heads_first
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.flashinfer import WORKSPACE_BYTES
from mla_conformance.backends.platform import BLACKWELL, Devices
from mla_conformance.backends.ragged import RaggedPrefillBackend

_NOTE = "TensorRT-LLM's kernels come with FlashInfer, the package tensorrt-llm on PyPI is a stub and of no use here"
_LIBRARY = Library("flashinfer.prefill", "flashinfer-python", extra("flashinfer"), _NOTE)


class TrtllmRaggedPrefillBackend(RaggedPrefillBackend):
    """One call a batch; requests without queries or keys are declared to the kernel on the host, where it can hear."""

    name: ClassVar[str] = "TRTLLM_RAGGED"
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ((192, 128), (128, 128), (256, 256))  # what the library asserts
    devices: ClassVar[Devices] = BLACKWELL
    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("flashinfer-python",),
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3),
        deviations=(
            Deviation("LSE to base 2, [T, N]", "times ln 2, transposed"),
            Deviation(
                "strides of q are ignored",
                "q is made contiguous; k and v keep their strides if their rows start at multiples of 16 bytes",
            ),
            Deviation("a request without queries or keys is undefined in 0.6.13", "0 and -inf by the lengths"),
            Deviation("0.7.2 drops such requests if it knows the lengths on the host", "they are passed"),
            Deviation("counters in the workspace must start at zero", "zeroed when it is allocated"),
        ),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        kernel = _LIBRARY.load().trtllm_ragged_attention_deepseek
        direct = out if out is not None and out.is_contiguous() else None
        output, lse = kernel(
            query=aligned(q.contiguous()),
            key=aligned(k),
            value=aligned(v),
            workspace_buffer=self._workspace(q.device),
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            window_left=-1,
            enable_pdl=False,
            return_lse=True,
            out=direct,
            **_lengths(batch),
            **_host_lengths(kernel, batch),
        )
        return blank_output(output, batch), blank_lse(natural_heads_first(lse), batch)

    def _workspace(self, device: torch.device) -> Tensor:
        if not hasattr(self, "_buffer"):
            self._buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._buffer


def _lengths(batch: RaggedBatch) -> dict[str, Any]:
    """Lengths and mask as the kernel's keywords."""
    return {
        "seq_lens": batch.key_start_loc.diff(),
        "max_q_len": batch.max_query_len,
        "max_kv_len": batch.max_key_len,
        "batch_size": len(batch.query_lens),
        "cum_seq_lens_q": batch.query_start_loc,
        "cum_seq_lens_kv": batch.key_start_loc,
        "is_causal": batch.causal,
    }


def _host_lengths(kernel: Any, batch: RaggedBatch) -> dict[str, Tensor]:
    """Lengths on the host, for the versions that use them to drop empty requests."""
    if "kv_seq_lens_cpu" not in inspect.signature(kernel).parameters:
        return {}
    lengths = {"q_seq_lens_cpu": batch.query_lens, "kv_seq_lens_cpu": batch.key_lens}
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in lengths.items()}
