"""CUDNN: cuDNN's fused attention, by the frontend's graph API or by FlashInfer's entry; ``fp8`` is its node for e4m3.

On Hopper that writes e4m3 codes alone, so that it computes new tokens with an output scale.
"""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch, aligned, writable
from mla_conformance.backends.cudnn_graph import CUDNN, SCALES, Key, execute, lengths, offsets
from mla_conformance.backends.flashinfer import FLASHINFER, WORKSPACE_BYTES
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.ragged import RaggedPrefillBackend

_ALIGNED = ("operands must start at multiples of 16 bytes", "others are copied")
_OFFSETS = ("lengths and element offsets instead of token offsets", "computed on the device, int64")
_EMPTY = ("output and LSE of a row without keys are undefined", "0 and -inf where the lengths say so")
_FRONTEND = "nvidia-cudnn-frontend nvidia-cudnn-cu13"
_P_SCALE, _SHORTEST = 2.0**8, 2
"""Of the fp8 node: what P is scaled by, and what the longest request of a plan has at least."""


class CudnnPrefillBackend(RaggedPrefillBackend):
    """The family: the graph API, or FlashInfer's entry where only that is asked for."""

    name = "CUDNN"
    devices = packaged.FROM_HOPPER  # which ragged operands need
    by_device = {0: ("graph", "flashinfer")}
    takes_head_dims = staticmethod(lambda qk, v: max(qk, v) <= 256 and not qk % 8 and not v % 8)
    blanks = ("output", "lse")

    def kernel_evidence(self) -> dict[str, str]:
        return {**super().kernel_evidence(), "cudnn": str(CUDNN.load().backend_version())}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        direct = writable(out, self.v_head_dim)
        output = q.new_empty(len(q), self.num_heads, self.v_head_dim) if direct is None else direct
        return output, self.written(aligned(q), aligned(k), aligned(v), output, batch)

    def written(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        """Write ``output`` [T, N, V], packed; return the LSE [N, T]. By a graph, of e4m3 operands with scales."""
        if not self.variant:
            raise self.not_a_family()
        lse = q.new_empty(len(q), self.num_heads, dtype=torch.float32)
        key, tensors = Key.of(q, k, v, batch, self.scale), {"q": q, "k": k, "v": v, "o": output, "stats": lse}
        if self.writes_e4m3 and self._output_scale is not None:
            tensors |= dict.fromkeys(SCALES, lse.new_ones(1))
            tensors |= {"scale_s": lse.new_full((1,), _P_SCALE), "descale_s": lse.new_full((1,), 1 / _P_SCALE)}
            tensors["scale_o"] = self._output_scale.float().reciprocal().reshape(1)
            longest = (max(_SHORTEST, key.max_query_len), max(_SHORTEST, key.max_key_len))
            key = key._replace(max_query_len=longest[0], max_key_len=longest[1])
        self._served = {"plan": execute(key, tensors, batch)}
        return lse.mT


_FP8_ALONE = ("Hopper's node for e4m3 operands writes e4m3 codes only", "left to the variant fp8")
_GRAPH = packaged.declared(_FRONTEND, _EMPTY, _OFFSETS, _ALIGNED, _FP8_ALONE)
CudnnPrefillBackend.also("graph", libraries=(CUDNN,), declaration=_GRAPH)


class CudnnByFlashInfer(CudnnPrefillBackend, variant="flashinfer"):
    libraries = (FLASHINFER, CUDNN)
    head_dims = ((192, 128), (128, 128))  # that its documentation gives
    declaration = packaged.declared(
        f"flashinfer-python {_FRONTEND}",
        _EMPTY,
        _OFFSETS,
        _ALIGNED,
        ("LSE padded to [B, longest, N]", "the rows that count are gathered"),
        ("LSE natural in 0.6.13, base 2 by default in 0.7.2", "0.7.2 is asked for the natural one"),
    )

    def written(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        entry = FLASHINFER.load().cudnn.cudnn_batch_prefill_with_kv_cache
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        queries, keys, longest_query, longest_key = batch.lengths
        starts = {"q": (queries, q), "o": (queries, output), "k": (keys, k), "v": (keys, v)}
        options: dict[str, Any] = {
            f"batch_offsets_{name}": offsets(at, x.stride(0)) for name, (at, x) in starts.items()
        }
        options |= {"lse_base": "ln"} if packaged.has_parameter(entry, "lse_base") else {}
        options |= {"actual_seq_lens_q": lengths(queries), "actual_seq_lens_kv": lengths(keys), "causal": batch.causal}
        options |= {"max_token_per_sequence": longest_query, "max_sequence_kv": longest_key, "out": output}
        _, padded = entry(q, k, v, self.scale, workspace, return_lse=True, **options)
        return batch.rows_that_count(padded)


class CudnnFp8(CudnnPrefillBackend, variant="fp8"):
    libraries = (CUDNN,)
    devices = packaged.HOPPER  # where it was tried
    writes_e4m3 = True
    supported_dtypes = [torch.float8_e4m3fn]
    takes_head_dims = staticmethod(lambda qk, v: max(qk, v) <= 256 and not qk % 16 and not v % 16)
    declaration = packaged.declared(
        _FRONTEND,
        _OFFSETS,
        _ALIGNED,
        ("output in e4m3 only", "unquantised output and chunks of context are declared unsupported"),
        ("multiplies the output by its scale", "is given the reciprocal, made on the device"),
        ("P is scaled by a number that the caller chooses", "2^8, and its inverse behind the product"),
        ("faults on a request without tokens", "such a request is left out"),
        ("has no plan for requests of one token", "the plan is for two, the lengths say one"),
        ("sums of e4m3 products keep 13 bits behind the point", "declared fp22"),
        ("the largest magnitudes of P and of the output are results too", "dropped"),
        e4m3_rounding=packaged.SCALED_P_FP22,
    )

    @classmethod
    def supports_unquantised_output(cls, dtype: torch.dtype) -> bool:
        return False

    def taken(self, batch: RaggedBatch, out: Tensor | None) -> RaggedBatch:
        if out is None or self._output_scale is None or out.dtype != torch.float8_e4m3fn:
            raise UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only; pass out in e4m3 and output_scale")
        return batch.without_empty_requests()

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only, that of a context chunk is bfloat16")
