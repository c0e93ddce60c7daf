"""From a real call to the case that describes it: lengths, dims, dtype, layout of operands and cache, ranks."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from mla_conformance.cases.case import Call, Case, Layout
from mla_conformance.problems.operands import TORCH_DTYPES
from mla_conformance.reference.dimensions import PRESETS, MLADimensions

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if dtype is not None}
_DEFAULT_PRESET = "r1"


def case_of_prefill(backend: Any, metadata: Any, arguments: Mapping[str, Any], values: bool) -> Case:
    """The case of one prefill call, of a context chunk if it has a ``chunk_idx``; ``values``: whether scales are read.

    It is a CaseError if no case describes the call, and a KeyError if cases do not know the dtype of q.
    """
    q, k, v = (arguments[name] for name in "qkv")
    on_cpu = getattr(metadata, "query_lens_cpu", None)
    lengths = tuple((metadata.query_start_loc.diff() if on_cpu is None else on_cpu).tolist())
    chunk = arguments.get("chunk_idx")
    if chunk is None:
        scale = arguments.get("output_scale")
        asked: dict[str, Any] = {
            "capability": Call.NEW_TOKENS.value,
            "lse": bool(arguments["return_softmax_lse"]),
            "out": arguments.get("out") is not None,
            "quant": "none" if scale is None else "fp8",
            "inflate": _inflation(metadata.max_query_len, lengths),
        }
        if values and scale is not None:
            asked["oscale"] = max(1, round(scale.item() * 1e6))
    else:
        context = metadata.chunked_context
        kv = tuple(context.seq_lens[chunk].tolist())
        inflate = _inflation(context.max_seq_lens[chunk], kv)
        asked = {"capability": Call.CONTEXT_CHUNK.value, "kv": kv, "inflate": inflate}
    # The layout of the suite that the strides resemble most.
    if not q.is_contiguous() and q.transpose(0, 1).is_contiguous():
        layout = Layout.HEADS_FIRST
    elif any(x.stride(1) % 2 for x in (q, k, v)):
        layout = Layout.ODD
    elif not (q.is_contiguous() and k.is_contiguous()):
        layout = Layout.SLICED
    else:
        layout = Layout.PACKED if v.is_contiguous() else Layout.KV_B_PROJ
    return Case.of(
        dtype=_DTYPE_NAMES[q.dtype],
        dims=_dims_of(backend),
        heads=q.shape[1],
        q=lengths,
        scale=round(100 * backend.scale * math.sqrt(q.shape[2])),
        layout=layout.value,
        pad=max(0, q.shape[0] - sum(lengths)),
        **asked,
    )


def case_of_decode(backend: Any, metadata: Any, arguments: Mapping[str, Any], values: bool) -> Case:
    """The case of one decode call; on several ranks that of all of them, which share it.

    Errors as for a prefill, and a ValueError if a request without tokens stands before others, which no case has.
    """
    query, cache = arguments["ql_nope"], arguments["kv_cache"]
    whole = metadata.seq_lens_cpu if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens
    q, totals = tuple(metadata.query_lens_cpu.tolist()), tuple(whole.tolist())
    counted = len(totals) - next((i for i, total in enumerate(reversed(totals)) if total), len(totals))
    if any(total < new for new, total in zip(q[:counted], totals, strict=False)):
        raise ValueError(f"expected sequences of at least the new tokens {list(q)}, padding last, got {list(totals)}")
    q, totals = q[:counted], totals[:counted]
    # The layouts of the suite that the strides resemble most.
    if query.stride(1) % 2:
        layout = Layout.ODD
    elif query.transpose(0, 1).is_contiguous():
        layout = Layout.HEADS_FIRST if arguments["q_pe"].transpose(0, 1).is_contiguous() else Layout.KV_B_PROJ
    else:
        layout = Layout.PACKED if query.is_contiguous() else Layout.SLICED
    scale = {"kscale": max(1, round(arguments["k_scale"].item() * 1e6))} if values else {}
    dims = backend.qk_nope_head_dim + backend.qk_rope_head_dim
    return Case.of(
        capability=Call.DECODE.value,
        dtype=_DTYPE_NAMES[query.dtype],
        dims=_dims_of(backend),
        heads=query.shape[1],
        q=q,
        kv=tuple(total - new for total, new in zip(totals, q, strict=True)),
        page=cache.shape[1],
        scale=round(100 * backend.scale * math.sqrt(dims)),
        layout=layout.value,
        pad=len(metadata.query_lens_cpu) - len(q),
        inflate=_inflation(metadata.max_seq_len, tuple(metadata.seq_lens_cpu.tolist())),
        cache=backend.kv_cache_dtype,
        layers=max(1, cache.stride(0) // (cache.shape[1] * cache.stride(1))),
        ranks=metadata.dcp_world_size,
        interleave=metadata.cp_kv_cache_interleave_size,
        **scale,
    )


def _inflation(maximum: int, lengths: tuple[int, ...]) -> int:
    """How many times the longest length the metadata's maximum is."""
    return max(1, int(maximum) // max(1, *lengths))


def _dims_of(backend: Any) -> str:
    """The head dims of an instance as a case names them."""
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    head = MLADimensions(**{name: getattr(backend, name) for name in sizes})
    for name in (_DEFAULT_PRESET, *PRESETS):
        if (PRESETS[name].head, PRESETS[name].kv_lora_rank) == (head, backend.kv_lora_rank):
            return name
    return f"{head.qk_nope_head_dim}-{head.qk_rope_head_dim}-{head.v_head_dim}-{backend.kv_lora_rank}"


def observed(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape, strides, dtype and device of every tensor of a call, as they were."""
    return {
        name: {
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
        }
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    }
