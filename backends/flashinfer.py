"""FLASHINFER, FLASHINFER_TREE, TRTLLM_RAGGED: what FlashInfer 0.6.13 and 0.7.2 call for ragged batches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import conversions, kernel, library_roles, packaged, tree
from mla_conformance.backends.conversions import RaggedBatch, aligned, natural_heads_first, pad_head_dim, writable

FLASHINFER = packaged.in_extra("flashinfer", "flashinfer", "flashinfer-python")
TVM_FFI = packaged.in_extra("flashinfer", "tvm_ffi", "apache-tvm-ffi")
DISTRIBUTIONS = "flashinfer-python apache-tvm-ffi"
WORKSPACE_BYTES = 128 << 20


def _with_natural_lse(run: Any, *operands: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """What a wrapper returns, its LSE [N, T]: 0.6.13 knows none but that to base 2, [T, N]."""
    natural = packaged.has_parameter(run, "lse_base")
    options |= {"lse_base": "ln", "lse_layout": "HN"} if natural else {}
    output, lse = run(*operands, return_lse=True, **options)
    return output, lse if natural else natural_heads_first(lse)


class FlashInferPrefillBackend(library_roles.RaggedPrefillBackend):
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
        operands, direct = (aligned(q), aligned(k), aligned(v), *scales), writable(out, v.shape[-1])
        output, lse = _with_natural_lse(self._plans[batch.chunk_idx].run, *operands, out=direct)
        return output[..., : self.v_head_dim], lse

    def plan(self, q: Tensor, v_columns: int, batch: RaggedBatch) -> Any:
        """A wrapper of its own for each live plan; they share one workspace and run in stream order."""
        if not hasattr(self, "_buffer"):
            self._buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = FLASHINFER.load().BatchPrefillWithRaggedKVCacheWrapper(self._buffer, "NHD", backend=self.variant)
        sizes = (*batch.lengths[:2], self.num_heads, self.num_heads, q.shape[-1])
        dtypes = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": kernel.output_dtype(q.dtype)}
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


_WIDTHS = (64, 128, 256)


class FlashInferTreeBackend(library_roles.PagedTreeBackend):
    name = "FLASHINFER_TREE"
    libraries = (FLASHINFER, TVM_FFI)
    devices = packaged.FROM_AMPERE
    supported_latent_dims = []
    declaration = packaged.declared(
        DISTRIBUTIONS,
        packaged.JOINS_Q,
        ("one head dim of keys and values, 64, 128 or 256", "gathers latents, padded with zeros; the output is cut"),
        ("a mask has columns of the context", "they are added, and all seen"),
        ("0.6.13: LSE to base 2, [T, N]", "times ln 2, transposed; 0.7.2 is asked for a natural LSE [N, T]"),
        ("plan() before run(), with the mask", "plans at every call"),
        packaged.LSE_OF_ROUNDED_P,
        packaged.PARTIAL_OUTPUTS,
        rounding=packaged.ROUNDED_P_IN_PARTS,
    )

    @classmethod
    def _reasons(cls, config: Any) -> Iterator[str]:
        yield from super()._reasons(config)
        if (columns := config.kv_lora_rank + config.qk_rope_head_dim) > _WIDTHS[-1]:
            yield f"keys of {columns} columns not supported (at most {_WIDTHS[-1]})"

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, batch = self._decode_metadata, tree.TreeBatch.of(self._decode_metadata, kv_cache.shape[1])
        columns = ql_nope.shape[-1] + q_pe.shape[-1]
        width = next(width for width in _WIDTHS if width >= columns)
        q = pad_head_dim(torch.cat([ql_nope, q_pe], dim=-1), width)
        keys = pad_head_dim(kv_cache.flatten(0, 1)[torch.cat(batch.slots)].unsqueeze(1), width)
        if not hasattr(self, "_buffer"):
            self._buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = FLASHINFER.load().BatchPrefillWithRaggedKVCacheWrapper(self._buffer, "NHD", backend="fa2")
        starts = (metadata.query_start_loc, conversions.starts_of(batch.lengths).to(q.device))
        dtypes = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": q.dtype}
        sizes = {"head_dim_vo": width, "custom_mask": batch.mask, "sm_scale": self.scale}
        wrapper.plan(*starts, self.num_heads, 1, width, **sizes, **dtypes)
        output, lse = _with_natural_lse(wrapper.run, q, keys, keys)
        return output[..., : self.kv_lora_rank].contiguous(), lse


_NOTE = "TensorRT-LLM's kernels come with FlashInfer, the package tensorrt-llm on PyPI is a stub and of no use here"


class TrtllmRaggedPrefillBackend(library_roles.RaggedPrefillBackend):
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
