"""CUDNN: cuDNN's fused attention, by the frontend's graph API or by FlashInfer's entry; ``fp8`` is its node for e4m3.

On Hopper that writes e4m3 codes alone, so that it computes new tokens with an output scale. A graph is kept for good,
one a shape: lengths and offsets are data, the longest lengths and all strides part of its plan.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import flashinfer, kernel, library_roles, packaged
from mla_conformance.backends.conversions import RaggedBatch, aligned, writable

CUDNN = packaged.in_extra("cudnn", "cudnn", "nvidia-cudnn-frontend")
SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
"""Float32 scalars of the node for e4m3 operands: each is multiplied where its name says."""
_MAXIMA = ("amax_s", "amax_o")
_RAGGED = ("q", "k", "v", "o", "stats")


class Key(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    requests: int
    heads: int
    max_query_len: int
    max_key_len: int
    head_dims: tuple[int, int]
    strides: tuple[tuple[int, ...], ...]
    scale: float
    causal: bool


_ALIGNED = ("operands must start at multiples of 16 bytes", "others are copied")
_OFFSETS = ("lengths and element offsets instead of token offsets", "computed on the device, int64")
_EMPTY = ("output and LSE of a row without keys are undefined", "0 and -inf where the lengths say so")
_FRONTEND = "nvidia-cudnn-frontend nvidia-cudnn-cu13"
_P_SCALE, _SHORTEST = 2.0**8, 2
"""Of the fp8 node: what P is scaled by, and what the longest request of a plan has at least."""


class CudnnPrefillBackend(library_roles.RaggedPrefillBackend):
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
        lse = q.new_empty(len(q), self.num_heads, dtype=torch.float32)
        sizes = (len(batch.query_lens), q.shape[1], *batch.lengths[2:], (q.shape[-1], v.shape[-1]))
        key = Key(q.device, q.dtype, *sizes, tuple(x.stride() for x in (q, k, v)), self.scale, batch.causal)
        tensors = {"q": q, "k": k, "v": v, "o": output, "stats": lse}
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
    libraries = (flashinfer.FLASHINFER, CUDNN)
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
        entry = flashinfer.FLASHINFER.load().cudnn.cudnn_batch_prefill_with_kv_cache
        workspace = torch.empty(flashinfer.WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        queries, keys, longest_query, longest_key = batch.lengths
        starts = {"q": (queries, q), "o": (queries, output), "k": (keys, k), "v": (keys, v)}
        given = {f"batch_offsets_{name}": offsets(at, x.stride(0)) for name, (at, x) in starts.items()}
        options: dict[str, Any] = {"max_token_per_sequence": longest_query, "max_sequence_kv": longest_key}
        options |= {"lse_base": "ln"} if packaged.has_parameter(entry, "lse_base") else {}
        options |= {"actual_seq_lens_q": lengths(queries), "actual_seq_lens_kv": lengths(keys), "causal": batch.causal}
        _, padded = entry(q, k, v, self.scale, workspace, return_lse=True, out=output, **given, **options)
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
            raise kernel.UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only; pass out in e4m3 and output_scale")
        return batch.without_empty_requests()

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise kernel.UnsupportedConfiguration("CUDNN[fp8]: output in e4m3 only, that of a context chunk is bfloat16")


def lengths(start_loc: Tensor) -> Tensor:
    """[B, 1, 1, 1] int32."""
    return start_loc.diff().view(-1, 1, 1, 1)


def offsets(start_loc: Tensor, token_stride: int) -> Tensor:
    """[B + 1, 1, 1, 1] int64, in elements."""
    return (start_loc.long() * token_stride).view(-1, 1, 1, 1)


def execute(key: Key, tensors: Mapping[str, Tensor], batch: RaggedBatch) -> str:
    """Run the graph of ``key`` on q, k, v, o and stats, and for e4m3 :data:`SCALES`; the name of its plan."""
    handle, stream = _handle(key.device), torch.cuda.current_stream(key.device).cuda_stream
    CUDNN.load().set_stream(handle=handle, stream=stream)
    graph, operands, size, name = _plan(key)
    start_loc = {name: batch.key_start_loc if name in "kv" else batch.query_start_loc for name in _RAGGED}
    bound = {f"{name}_at": offsets(start_loc[name], tensors[name].stride(0)) for name in _RAGGED}
    bound |= {"q_len": lengths(batch.query_start_loc), "k_len": lengths(batch.key_start_loc)}
    bound |= {name: tensors["stats"].new_empty(1) for name in _MAXIMA if name in operands}
    workspace = torch.empty(max(1, size), dtype=torch.uint8, device=key.device)
    named = {operands[name]: tensor for name, tensor in {**tensors, **bound}.items()}
    graph.execute(named, workspace, handle=handle)
    return name


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return CUDNN.load().create_handle()


@cache
def _plan(key: Key) -> tuple[Any, dict[str, Any], int, str]:
    """A built graph, its operands by name, offsets under ``NAME_at``, its scratch bytes, and the name of its plan."""
    cudnn: Any = CUDNN.load()
    types = cudnn.data_type
    io_type = {torch.float16: types.HALF, torch.bfloat16: types.BFLOAT16}.get(key.dtype, types.FP8_E4M3)
    computed = {"intermediate_data_type": types.FLOAT, "compute_data_type": types.FLOAT}
    graph = cudnn.pygraph(io_data_type=io_type, handle=_handle(key.device), **computed)
    operands: dict[str, Any] = {}
    counts = {f"{name}_at": (key.requests + 1, types.INT64) for name in _RAGGED}
    counts |= {name: (key.requests, types.INT32) for name in ("q_len", "k_len")}
    counts |= {name: (1, types.FLOAT) for name in SCALES if io_type == types.FP8_E4M3}
    for name, (count, kind) in counts.items():
        operands[name] = graph.tensor(name=name, dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind)
    for name, (shape, stride) in layouts(key).items():
        operands[name] = graph.tensor(name=name, dim=shape, stride=stride, data_type=io_type)
        operands[name].set_ragged_offset(operands[f"{name}_at"])
    scales = {name: operands[name] for name in SCALES if name in operands}
    seen = {"q": operands["q"], "k": operands["k"], "v": operands["v"], "seq_len_q": operands["q_len"]}
    mask = {"use_causal_mask": key.causal, "use_padding_mask": True, "seq_len_kv": operands["k_len"]}
    node = graph.sdpa_fp8 if scales else graph.sdpa
    asked = {"name": "attention", "attn_scale": key.scale, "generate_stats": True}
    output, stats, *maxima = node(**asked, **seen, **mask, **scales)
    # Packed [T, N, V] and [T, N], and of e4m3 the largest magnitudes of P and of the output.
    rows, width = (key.requests, key.heads, key.max_query_len), key.head_dims[1]
    per_token = key.heads * width
    output.set_output(True).set_dim((*rows, width)).set_stride((per_token * rows[2], width, per_token, 1))
    output.set_data_type(io_type).set_ragged_offset(operands["o_at"])
    stats.set_output(True).set_dim((*rows, 1)).set_stride((key.heads * rows[2], 1, key.heads, 1))
    stats.set_data_type(types.FLOAT).set_ragged_offset(operands["stats_at"])
    for maximum in maxima:
        maximum.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(types.FLOAT)
    operands |= {"o": output, "stats": stats, **dict(zip(_MAXIMA, maxima, strict=False))}
    graph.build([cudnn.heur_mode.A])
    return graph, operands, graph.get_workspace_size(), graph.get_plan_name_at_index(0)


def layouts(key: Key) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Dims [B, N, longest, columns] and strides of q, k and v."""
    longest = (key.max_query_len, key.max_key_len, key.max_key_len)
    widths = (key.head_dims[0], *key.head_dims)
    return {
        name: ((key.requests, key.heads, length, width), (token * length, head, token, column))
        for name, length, width, (token, head, column) in zip("qkv", longest, widths, key.strides, strict=True)
    }
