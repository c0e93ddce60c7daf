"""Capture: a serving engine writes the metadata of its real calls as case files for ``certify --cases``.

Imports from: cases, problems, vocabulary, models.
"""

import inspect
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from mla_conformance.cases.case import Call, Case, Layout
from mla_conformance.models.profile import dims_of
from mla_conformance.problems.operands import TORCH_DTYPES
from mla_conformance.vocabulary.capabilities import write_case

VARIABLE, LIMIT = "MLA_CONFORMANCE_CAPTURE", 1000
_PREPARE = "prepare_metadata"
_ROLES = ((_PREPARE, "run_prefill_new_tokens", "run_prefill_context_chunk"), (_PREPARE, "run_decode"))
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if dtype is not None}


@contextmanager
def capture(backend: Any, directory: str | Path, values: bool = False, limit: int = LIMIT) -> Iterator[None]:
    """Write shapes, strides, dtypes and lengths of the calls that go to a backend while the context lasts.

    No tensor of the model is read; a length that is on the device only is copied, which waits for it. A call that no
    case describes is passed on and warned about once.

    A backend is an instance, or a class whose instances are all captured, with the methods of ``MLAPrefillBackend`` or
    ``MLADecodeBackend``, which a whole layer has not. The directory receives one case file per distinct call, ``limit``
    at most. With ``values`` the one tensor value that a case can hold is read, the scale of the output or of the cache.
    """
    with patch.multiple(backend, **_recorded(backend, _Capture(Path(directory), values, limit))):
        yield


def capture_from_environment(backend: Any) -> None:
    """Capture the calls of a backend for good, if MLA_CONFORMANCE_CAPTURE names a folder."""
    if directory := os.environ.get(VARIABLE):
        for name, call in _recorded(backend, _Capture(Path(directory), values=False, limit=LIMIT)).items():
            setattr(backend, name, call)


class _Capture:
    """Writes calls into a folder; whatever goes wrong is a warning, as an engine must not fail for it."""

    def __init__(self, directory: Path, values: bool, limit: int) -> None:
        self.directory, self.values, self.limit = directory, values, limit
        self._metadata: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._seen, self._warned, self._lock = set[str](), False, threading.Lock()

    def __call__(self, backend: Any, method: str, arguments: dict[str, Any]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # copying a length to the host would spoil the CUDA graph
        try:
            if method == _PREPARE:
                (self._metadata[backend],) = arguments.values()
                return
            if len(self._seen) >= self.limit:
                return
            kept = getattr(backend, "_prefill_metadata", None) or getattr(backend, "_decode_metadata", None)
            metadata = self._metadata.get(backend) or kept
            if metadata is None:
                raise ValueError("no metadata was prepared before it")
            case_of = _case_of_decode if method == "run_decode" else _case_of_prefill
            case = case_of(backend, metadata, arguments, self.values)
            with self._lock:
                if case.id in self._seen:
                    return
                self._seen.add(case.id)
            path = self.directory / f"{case.capability}-{case.digest}.json"
            if path.exists():  # another rank has written it
                return
            seen: dict[str, Any] = {"backend": type(backend).__name__}  # and every tensor of the call, as it was
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    dtype = str(value.dtype).removeprefix("torch.")
                    seen[name] = {"shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}
                    seen[name]["device"] = value.device.type
            write_case(path, case, seen)
        except Exception as error:
            if not self._warned:
                self._warned = True
                said = f"mla-conformance: a call of {method} was not captured: {type(error).__name__}: {error}"
                warnings.warn(said, RuntimeWarning, stacklevel=4)


def _recorded(backend: Any, recording: _Capture) -> dict[str, Any]:
    """The backend's methods, each behind a wrapper that records its calls."""
    methods = next((methods for methods in _ROLES if all(hasattr(backend, name) for name in methods)), None)
    if methods is None:
        expected = f"a backend with {' or '.join(map(', '.join, _ROLES))}"
        raise TypeError(f"expected {expected}, got {backend!r}; of a layer, capture its kernels' backends")

    def recorded(name: str) -> Callable[..., Any]:
        method = getattr(backend, name)
        signature = inspect.signature(method)

        @wraps(method)
        def call(*positional: Any, **named: Any) -> Any:
            with suppress(TypeError):  # which the call raises itself
                arguments = dict(signature.bind(*positional, **named).arguments)
                instance = arguments.pop(next(iter(arguments))) if isinstance(backend, type) else backend
                recording(instance, name, arguments)
            return method(*positional, **named)

        return call

    return {name: recorded(name) for name in methods}


def _case_of_prefill(backend: Any, metadata: Any, arguments: Mapping[str, Any], values: bool) -> Case:
    """The case of one prefill call, of a chunk of context if it has a ``chunk_idx``; ``values``: scales are read."""
    q, k, v = (arguments[name] for name in "qkv")
    on_cpu = getattr(metadata, "query_lens_cpu", None)
    lengths = tuple((metadata.query_start_loc.diff() if on_cpu is None else on_cpu).tolist())
    chunk, scale = arguments.get("chunk_idx"), arguments.get("output_scale")
    asked: dict[str, Any] = {"capability": Call.NEW_TOKENS.value, "pad": max(0, q.shape[0] - sum(lengths))}
    if chunk is None:
        asked |= {"lse": bool(arguments["return_softmax_lse"]), "out": arguments.get("out") is not None}
        asked |= {"quant": "none" if scale is None else "fp8", **_inflation(metadata.max_query_len, lengths)}
        asked |= {"oscale": _millionths(scale)} if values and scale is not None else {}
    else:
        context = metadata.chunked_context
        kv = tuple(context.seq_lens[chunk].tolist())
        asked |= {"capability": Call.CONTEXT_CHUNK.value, "kv": kv, **_inflation(context.max_seq_lens[chunk], kv)}
    # The layout of the suite that the strides resemble most.
    if not q.is_contiguous() and q.transpose(0, 1).is_contiguous():
        layout = Layout.HEADS_FIRST
    elif any(x.stride(1) % 2 for x in (q, k, v)):
        layout = Layout.ODD
    elif not (q.is_contiguous() and k.is_contiguous()):
        layout = Layout.SLICED
    else:
        layout = Layout.PACKED if v.is_contiguous() else Layout.KV_B_PROJ
    return _case(backend, q, lengths, q.shape[2], asked | {"layout": layout.value})


def _case_of_decode(backend: Any, metadata: Any, arguments: Mapping[str, Any], values: bool) -> Case:
    """The case of one decode call; on several ranks that of all of them, which share it."""
    query, cache = arguments["ql_nope"], arguments["kv_cache"]
    whole = metadata.seq_lens_cpu if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens
    q, totals = tuple(metadata.query_lens_cpu.tolist()), tuple(whole.tolist())
    counted = len(totals) - next((i for i, total in enumerate(reversed(totals)) if total), len(totals))
    if any(total < new for new, total in zip(q[:counted], totals, strict=False)):
        raise ValueError(f"expected sequences of at least the new tokens {list(q)}, padding last, got {list(totals)}")
    q, totals = q[:counted], totals[:counted]
    kv = tuple(total - new for total, new in zip(totals, q, strict=True))
    asked: dict[str, Any] = {"capability": Call.DECODE.value, "kv": kv, "page": cache.shape[1]}
    asked |= {"cache": backend.kv_cache_dtype, "pad": len(metadata.query_lens_cpu) - len(q)}
    asked |= _inflation(metadata.max_seq_len, tuple(metadata.seq_lens_cpu.tolist()))
    asked |= {"layers": max(1, cache.stride(0) // (cache.shape[1] * cache.stride(1)))}
    asked |= {"ranks": metadata.dcp_world_size, "interleave": metadata.cp_kv_cache_interleave_size}
    asked |= {"kscale": _millionths(arguments["k_scale"])} if values else {}
    # The layouts of the suite that the strides resemble most.
    if query.stride(1) % 2:
        layout = Layout.ODD
    elif query.transpose(0, 1).is_contiguous():
        layout = Layout.HEADS_FIRST if arguments["q_pe"].transpose(0, 1).is_contiguous() else Layout.KV_B_PROJ
    else:
        layout = Layout.PACKED if query.is_contiguous() else Layout.SLICED
    dim = backend.qk_nope_head_dim + backend.qk_rope_head_dim
    return _case(backend, query, q, dim, asked | {"layout": layout.value})


def _case(backend: Any, query: torch.Tensor, q: tuple[int, ...], dim: int, asked: dict[str, Any]) -> Case:
    """The case of a call whose queries are [T, N, D]; ``dim`` is what the usual softmax scale comes of."""
    dims = dims_of((backend.qk_nope_head_dim, backend.qk_rope_head_dim, backend.v_head_dim, backend.kv_lora_rank))
    about: dict[str, Any] = {"dtype": _DTYPE_NAMES[query.dtype], "dims": dims, "heads": query.shape[1]}
    return Case.of(**about, q=q, scale=round(100 * backend.scale * math.sqrt(dim)), **asked)


def _millionths(scale: torch.Tensor) -> int:
    return max(1, round(scale.item() * 1e6))


def _inflation(maximum: int, lengths: tuple[int, ...]) -> dict[str, int]:
    return {"inflate": max(1, int(maximum) // max(1, *lengths))}
