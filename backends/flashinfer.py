"""FLASHINFER: the ragged prefill wrapper of 0.6.13 and 0.7.2, with the backend that the variant names."""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch, aligned, natural_heads_first, pad_head_dim, writable
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.ragged import RaggedPrefillBackend

FLASHINFER = packaged.in_extra("flashinfer", "flashinfer", "flashinfer-python")
TVM_FFI = packaged.in_extra("flashinfer", "tvm_ffi", "apache-tvm-ffi")
DISTRIBUTIONS = "flashinfer-python apache-tvm-ffi"
WORKSPACE_BYTES = 128 << 20


class FlashInferPrefillBackend(RaggedPrefillBackend):
    """The family: fa3 on Hopper, cutlass on Blackwell, fa2 elsewhere."""

    name = "FLASHINFER"
    libraries = (FLASHINFER, TVM_FFI)
    devices = packaged.FROM_AMPERE
    by_device = {9: ("fa3", "fa2"), 10: ("cutlass", "fa2"), 0: ("fa2",)}
    head_dims = ((192, 128), (128, 128), (256, 256))
    blanks = ("lse",)
    declaration = packaged.declared(
        DISTRIBUTIONS,
        ("0.6.13: LSE to base 2, [T, N]", "times ln 2, transposed; 0.7.2 is asked for a natural LSE [N, T]"),
        ("0.6.13: LSE about -50000 in a row without keys", "-inf in the rows that the lengths say see no key"),
        packaged.COPIES,
        ("plan() before run(), float16 and d^-1/2 by default", "plans once a batch and chunk, naming all of it"),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        scales: tuple[Tensor, ...] = ()
        if q.dtype == torch.float8_e4m3fn:  # its kernels have one head dim, and scales of each head of q, k and v
            width = next(width for width in (64, 128, 256) if width >= max(x.shape[-1] for x in (q, k, v)))
            q, k, v = (pad_head_dim(x, width) for x in (q, k, v))
            scales = (torch.ones(self.num_heads, dtype=torch.float32, device=q.device),) * 3
        if batch.chunk_idx not in self._plans:
            self._plans[batch.chunk_idx] = self.plan(q, v.shape[-1], batch)
        run = self._plans[batch.chunk_idx].run
        natural = packaged.has_parameter(run, "lse_base")
        options: dict[str, Any] = {"lse_base": "ln", "lse_layout": "HN"} if natural else {}
        options |= {"out": writable(out, v.shape[-1]), "return_lse": True}
        output, lse = run(aligned(q), aligned(k), aligned(v), *scales, **options)
        return output[..., : self.v_head_dim], lse if natural else natural_heads_first(lse)

    def plan(self, q: Tensor, v_columns: int, batch: RaggedBatch) -> Any:
        """A wrapper of its own for each live plan; they share one workspace and run in stream order."""
        if not hasattr(self, "_buffer"):
            self._buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = FLASHINFER.load().BatchPrefillWithRaggedKVCacheWrapper(self._buffer, "NHD", backend=self.variant)
        sizes = (*batch.lengths[:2], self.num_heads, self.num_heads, q.shape[-1])
        dtypes = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": output_dtype(q.dtype)}
        wrapper.plan(*sizes, head_dim_vo=v_columns, causal=batch.causal, sm_scale=self.scale, **dtypes)
        self._served = {"backend": str(getattr(wrapper, "_backend", self.variant))}
        return wrapper


FlashInferPrefillBackend.also(
    "fa2", packaged.LSE_OF_ROUNDED_P, packaged.PARTIAL_OUTPUTS, rounding=packaged.ROUNDED_P_IN_PARTS
)
FlashInferPrefillBackend.also(
    "fa3",
    ("e4m3 kernels have one head dim, 64, 128 or 256", "padded with zeros, the output is sliced"),
    ("e4m3 operands need scales of each head", "scales of 1 are handed over"),
    packaged.FP22_SUMS,
    e4m3_rounding=packaged.SCALED_P_FP22,
    supported_dtypes=[torch.float16, torch.bfloat16, torch.float8_e4m3fn],
    devices=packaged.HOPPER,
)
FlashInferPrefillBackend.also("cutlass", devices=packaged.BLACKWELL, head_dims=((192, 128), (128, 128)))
