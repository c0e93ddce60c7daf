"""TRTLLM_RAGGED: TensorRT-LLM's ragged prefill kernels for Blackwell, called through FlashInfer.

``trtllm_ragged_attention_deepseek`` of FlashInfer 0.6.13 and 0.7.2. The package tensorrt-llm on PyPI is a stub that
downloads from another index; it is not needed. Its own attention is TRTLLM (``backends/trtllm.py``).
"""

import inspect

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch, aligned, blank_lse, blank_output, natural_heads_first
from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.flashinfer import WORKSPACE_BYTES
from mla_conformance.backends.packaged import declared
from mla_conformance.backends.platform import BLACKWELL
from mla_conformance.backends.ragged import RaggedPrefillBackend

_NOTE = "TensorRT-LLM's kernels come with FlashInfer, the package tensorrt-llm on PyPI is a stub and of no use here"


class TrtllmRaggedPrefillBackend(RaggedPrefillBackend):
    """One call a batch; requests without queries or keys are declared to the kernel on the host, where it can hear."""

    name = "TRTLLM_RAGGED"
    libraries = (Library("flashinfer.prefill", "flashinfer-python", extra("flashinfer"), _NOTE),)
    devices = BLACKWELL
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    head_dims = ((192, 128), (128, 128), (256, 256))  # what the library asserts
    declaration = declared(
        "flashinfer-python",
        ("LSE to base 2, [T, N]", "times ln 2, transposed"),
        (
            "strides of q are ignored",
            "q is made contiguous; k and v keep their strides if their rows start at multiples of 16 bytes",
        ),
        ("a request without queries or keys is undefined in 0.6.13", "0 and -inf by the lengths"),
        ("0.7.2 drops such requests if it knows the lengths on the host", "they are passed"),
        ("counters in the workspace must start at zero", "zeroed when it is allocated"),
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        kernel = self.library.trtllm_ragged_attention_deepseek
        if not hasattr(self, "_buffer"):
            self._buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        on_host = {"q_seq_lens_cpu": batch.query_lens, "kv_seq_lens_cpu": batch.key_lens}
        hears = "kv_seq_lens_cpu" in inspect.signature(kernel).parameters
        output, lse = kernel(
            query=aligned(q.contiguous()),
            key=aligned(k),
            value=aligned(v),
            workspace_buffer=self._buffer,
            seq_lens=batch.key_start_loc.diff(),
            max_q_len=batch.max_query_len,
            max_kv_len=batch.max_key_len,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=len(batch.query_lens),
            window_left=-1,
            cum_seq_lens_q=batch.query_start_loc,
            cum_seq_lens_kv=batch.key_start_loc,
            enable_pdl=False,
            is_causal=batch.causal,
            return_lse=True,
            out=out if out is not None and out.is_contiguous() else None,
            **{name: torch.tensor(x, dtype=torch.int32) for name, x in on_host.items() if hears},
        )
        return blank_output(output, batch), blank_lse(natural_heads_first(lse), batch)
