"""TRTLLM_RAGGED: TensorRT-LLM's ragged prefill kernels for Blackwell, called through FlashInfer 0.6.13 and 0.7.2."""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch, aligned, natural_heads_first, writable
from mla_conformance.backends.flashinfer import WORKSPACE_BYTES
from mla_conformance.backends.ragged import RaggedPrefillBackend

_NOTE = "TensorRT-LLM's kernels come with FlashInfer, the package tensorrt-llm on PyPI is a stub and of no use here"


class TrtllmRaggedPrefillBackend(RaggedPrefillBackend):
    name = "TRTLLM_RAGGED"
    libraries = (packaged.in_extra("flashinfer", "flashinfer.prefill", "flashinfer-python", _NOTE),)
    devices = packaged.BLACKWELL
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    blanks = ("output", "lse")
    head_dims = ((192, 128), (128, 128), (256, 256))  # what the library asserts
    declaration = packaged.declared(
        "flashinfer-python",
        ("LSE to base 2, [T, N]", "times ln 2, transposed"),
        (
            "strides of q are ignored",
            "q is made contiguous; k and v keep their strides if their rows start at multiples of 16 bytes",
        ),
        ("a request without queries or keys is undefined in 0.6.13", "0 and -inf by the lengths"),
        ("0.7.2 drops such requests if it knows the lengths on the host", "they are passed"),
        ("counters in the workspace must start at zero", "zeroed when it is allocated"),
        e4m3_rounding=packaged.Rounding(p=packaged.Precision.SCALED_E4M3),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        call = self.library.trtllm_ragged_attention_deepseek
        if not hasattr(self, "_buffer"):
            self._buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        query_starts, key_starts, longest_query, longest_key = batch.lengths
        on_host = {"q_seq_lens_cpu": batch.query_lens, "kv_seq_lens_cpu": batch.key_lens}
        hears = packaged.has_parameter(call, "kv_seq_lens_cpu")
        told = {name: torch.tensor(x, dtype=torch.int32) for name, x in on_host.items() if hears}
        operands = {"query": aligned(q.contiguous()), "key": aligned(k), "value": aligned(v), "out": writable(out)}
        queries = {"cum_seq_lens_q": query_starts, "max_q_len": longest_query, "batch_size": len(batch.query_lens)}
        keys = {"cum_seq_lens_kv": key_starts, "max_kv_len": longest_key, "seq_lens": key_starts.diff(), **told}
        scales = {"bmm1_scale": self.scale, "bmm2_scale": 1.0, "o_sf_scale": 1.0, "workspace_buffer": self._buffer}
        options = {"window_left": -1, "enable_pdl": False, "is_causal": batch.causal, "return_lse": True}
        output, lse = call(**operands, **queries, **keys, **scales, **options)
        return output, natural_heads_first(lse)
