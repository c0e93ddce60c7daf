"""CUDNN: cuDNN's fused attention, by the frontend's graph API (``graph``) or by FlashInfer's entry (``flashinfer``).

Variant ``fp8`` is the attention node for e4m3 operands in a graph like that of ``graph``. On Hopper it writes e4m3
codes and nothing else, so new tokens with an output scale are all that it computes here.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch, aligned, blank_lse, blank_output, rows_that_count
from mla_conformance.backends.cudnn_graph import CUDNN, SCALES, Key, execute, lengths, offsets
from mla_conformance.backends.declaration import Deviation, Precision, Rounding
from mla_conformance.backends.flashinfer import FLASHINFER, WORKSPACE_BYTES
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.packaged import declared
from mla_conformance.backends.platform import FROM_HOPPER, HOPPER
from mla_conformance.backends.ragged import RaggedPrefillBackend

_ALIGNED = Deviation("operands must start at multiples of 16 bytes", "others are copied")
_OFFSETS = Deviation("lengths and element offsets instead of token offsets", "computed on the device, int64")
_EMPTY = Deviation("output and LSE of a row without keys are undefined", "0 and -inf where the lengths say so")
_P_SCALE, _SHORTEST = 2.0**8, 2
"""Of the fp8 node: what P is scaled by, and what the longest request of a plan has at least."""


class CudnnPrefillBackend(RaggedPrefillBackend):
    """The family: the graph API, or FlashInfer's entry where only that is asked for."""

    name = "CUDNN"
    devices = FROM_HOPPER  # which ragged operands need
    by_device = {0: ("graph", "flashinfer")}
    takes_head_dims = staticmethod(lambda qk, v: max(qk, v) <= 256 and not qk % 8 and not v % 8)

    def kernel_evidence(self) -> dict[str, str]:
        return {**super().kernel_evidence(), "cudnn": str(CUDNN.load().backend_version())}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (aligned(x) for x in (q, k, v))
        direct = out is not None and out.is_contiguous() and aligned(out) is out
        output = out if out is not None and direct else q.new_empty(q.shape[0], self.num_heads, self.v_head_dim)
        lse = self.written(q, k, v, output, batch)
        return blank_output(output, batch), blank_lse(lse, batch)

    def written(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        """Write ``output`` [T, N, V], packed; return the LSE [N, T]."""
        raise self.not_a_family()


class CudnnGraph(CudnnPrefillBackend, variant="graph"):
    """One graph of the frontend a shape."""

    libraries = (CUDNN,)
    declaration = declared(
        "nvidia-cudnn-frontend nvidia-cudnn-cu13",
        _EMPTY,
        _OFFSETS,
        _ALIGNED,
        ("Hopper's node for e4m3 operands writes e4m3 codes only", "left to the variant fp8"),
    )

    def written(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        lse = q.new_empty(q.shape[0], self.num_heads, dtype=torch.float32)
        tensors = {"q": q, "k": k, "v": v, "o": output, "stats": lse}
        self._served = {"plan": execute(Key.of(q, k, v, batch, self.scale), tensors, batch)}
        return lse.mT


class CudnnByFlashInfer(CudnnPrefillBackend, variant="flashinfer"):
    """``flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache``."""

    libraries = (FLASHINFER, CUDNN)
    head_dims = ((192, 128), (128, 128))  # that its documentation gives
    declaration = declared(
        "flashinfer-python nvidia-cudnn-frontend nvidia-cudnn-cu13",
        _EMPTY,
        _OFFSETS,
        _ALIGNED,
        ("LSE padded to [B, longest, N]", "the rows that count are gathered"),
        ("LSE natural in 0.6.13, base 2 by default in 0.7.2", "0.7.2 is asked for the natural one"),
    )

    def written(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        entry = FLASHINFER.load().cudnn.cudnn_batch_prefill_with_kv_cache
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        options: dict[str, Any] = {"causal": batch.causal, "return_lse": True, "out": output}
        options |= {"lse_base": "ln"} if "lse_base" in inspect.signature(entry).parameters else {}
        queries, keys = batch.query_start_loc, batch.key_start_loc
        places = {f"batch_offsets_{name}": offsets(queries, x.stride(0)) for name, x in (("q", q), ("o", output))}
        places |= {f"batch_offsets_{name}": offsets(keys, x.stride(0)) for name, x in (("k", k), ("v", v))}
        places |= {"actual_seq_lens_q": lengths(queries), "actual_seq_lens_kv": lengths(keys)}
        options |= {"max_token_per_sequence": batch.max_query_len, "max_sequence_kv": batch.max_key_len}
        _, padded = entry(q, k, v, self.scale, workspace, **places, **options)
        return rows_that_count(padded, batch)


class CudnnFp8(CudnnPrefillBackend, variant="fp8"):
    """The node ``sdpa_fp8``."""

    libraries = (CUDNN,)
    devices = HOPPER  # where it was tried
    writes_e4m3 = True
    supported_dtypes = [torch.float8_e4m3fn]
    takes_head_dims = staticmethod(lambda qk, v: max(qk, v) <= 256 and not qk % 16 and not v % 16)
    declaration = declared(
        "nvidia-cudnn-frontend nvidia-cudnn-cu13",
        _OFFSETS,
        _ALIGNED,
        ("output in e4m3 only", "unquantised output and chunks of context are declared unsupported"),
        ("multiplies the output by its scale", "is given the reciprocal, made on the device"),
        ("P is scaled by a number that the caller chooses", "2^8, and its inverse behind the product"),
        ("faults on a request without tokens", "such a request is left out"),
        ("has no plan for requests of one token", "the plan is for two, the lengths say one"),
        ("sums of e4m3 products keep 13 bits behind the point", "declared fp22"),
        ("the largest magnitudes of P and of the output are results too", "dropped"),
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22),
    )

    @classmethod
    def supports_unquantised_output(cls, dtype: torch.dtype) -> bool:
        return False

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Of the requests that have tokens; ``out`` and ``output_scale`` must be given."""
        if out is None or output_scale is None or out.dtype != torch.float8_e4m3fn:
            raise UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only; pass out in e4m3 and output_scale")
        self._scale_o = output_scale.float().reciprocal().reshape(1)
        batch = RaggedBatch.new_tokens(self._prefill_metadata).without_empty_requests()
        output, lse = self._run(q, k, v, batch, out)
        return (output, lse) if return_softmax_lse else output

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only, that of a context chunk is bfloat16")

    def written(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, batch: RaggedBatch) -> Tensor:
        lse = q.new_empty(q.shape[0], self.num_heads, dtype=torch.float32)
        scales = dict.fromkeys(SCALES, lse.new_ones(1))
        scales |= {"scale_s": lse.new_full((1,), _P_SCALE), "descale_s": lse.new_full((1,), 1 / _P_SCALE)}
        tensors = {"q": q, "k": k, "v": v, "o": output, "stats": lse, **scales, "scale_o": self._scale_o}
        key = Key.of(q, k, v, batch, self.scale)
        key = key._replace(max_query_len=max(_SHORTEST, key.max_query_len), max_key_len=max(_SHORTEST, key.max_key_len))
        self._served = {"plan": execute(key, tensors, batch)}
        return lse.mT
