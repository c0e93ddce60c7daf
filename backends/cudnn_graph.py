"""cuDNN's ragged attention as graphs of the frontend, one a shape, kept for the life of the process.

Lengths and offsets are data, the longest lengths and all strides part of the plan. Query and key lengths of a causal
call are equal, so both alignments are the same mask.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch

CUDNN = packaged.in_extra("cudnn", "cudnn", "nvidia-cudnn-frontend")
SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
"""Float32 scalars of the node for e4m3 operands: each is multiplied where its name says."""
_MAXIMA = ("amax_s", "amax_o")
_RAGGED = ("q", "k", "v", "o", "stats")


class Key(NamedTuple):
    """All that a plan depends on; e4m3 operands have e4m3 output."""

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

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, scale: float) -> "Key":
        """The key of a call on q [T, N, D], k [S, N, D] and v [S, N, V]."""
        sizes = (len(batch.query_lens), q.shape[1], *batch.lengths[2:], (q.shape[-1], v.shape[-1]))
        return Key(q.device, q.dtype, *sizes, tuple(x.stride() for x in (q, k, v)), scale, batch.causal)


def lengths(start_loc: Tensor) -> Tensor:
    """[B, 1, 1, 1] int32."""
    return start_loc.diff().view(-1, 1, 1, 1)


def offsets(start_loc: Tensor, token_stride: int) -> Tensor:
    """[B + 1, 1, 1, 1] int64, in elements."""
    return (start_loc.long() * token_stride).view(-1, 1, 1, 1)


def execute(key: Key, tensors: Mapping[str, Tensor], batch: RaggedBatch) -> str:
    """Run the graph of ``key`` on q, k, v, o and stats, and for e4m3 :data:`SCALES`; the name of its plan."""
    graph, operands, size, name = _plan(key)
    start_loc = {name: batch.key_start_loc if name in "kv" else batch.query_start_loc for name in _RAGGED}
    bound = {f"{name}_at": offsets(start_loc[name], tensors[name].stride(0)) for name in _RAGGED}
    bound |= {"q_len": lengths(batch.query_start_loc), "k_len": lengths(batch.key_start_loc)}
    bound |= {name: tensors["stats"].new_empty(1) for name in _MAXIMA if name in operands}
    workspace = torch.empty(max(1, size), dtype=torch.uint8, device=key.device)
    named = {operands[name]: tensor for name, tensor in {**tensors, **bound}.items()}
    graph.execute(named, workspace, handle=_handle(key.device))
    return name


@cache
def _create_handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return CUDNN.load().create_handle()


def _handle(device: torch.device) -> Any:
    handle = _create_handle(device)
    CUDNN.load().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


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
