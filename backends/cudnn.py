"""CUDNN: cuDNN's fused attention, by the frontend's graph API (``graph``) or by FlashInfer's entry (``flashinfer``).

The graph is ragged: per-request lengths and element offsets are data, the longest lengths and all strides are part of
the plan. Query and key lengths of a causal call are equal, so top-left and bottom-right alignment are the same mask.
"""

import inspect
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from mla_conformance.backends.conversions import RaggedBatch, aligned, blank_lse, blank_output
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.flashinfer import FLASHINFER
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.ragged import RaggedPrefillBackend
from mla_conformance.reference.dimensions import MLADimensions

CUDNN = Library("cudnn", "nvidia-cudnn-frontend", extra("cudnn"))
_WORKSPACE_BYTES = 128 << 20
_EMPTY = Deviation("output and LSE of a row without keys are undefined", "0 and -inf where the lengths say so")
_ALIGNED = Deviation("operands must start at multiples of 16 bytes", "others are copied")
_FP8_NODE = Deviation(
    "Hopper's sdpa_fp8 takes e4m3 operands and writes e4m3 codes only",
    "e4m3 is undeclared: an interface that declares dtypes for all calls cannot say it of quantised output alone",
)
_OFFSETS = Deviation("lengths and element offsets instead of token offsets", "computed on the device, int64")


class CudnnPrefillBackend(RaggedPrefillBackend):
    """The family: the graph API, or FlashInfer's entry where only that is asked for."""

    needed_capability: ClassVar[str] = "9.0 or newer"

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "CUDNN"

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Ragged operands need Hopper or newer."""
        return device_capability is not None and device_capability >= (9, 0)

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Multiples of 8 columns, at most 256."""
        widths = (dimensions.qk_head_dim, dimensions.v_head_dim)
        return max(widths) <= 256 and not any(width % 8 for width in widths)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        q, k, v = (aligned(x) for x in (q, k, v))
        direct = out is not None and out.is_contiguous() and aligned(out) is out
        output = out if out is not None and direct else q.new_empty(q.shape[0], self.num_heads, self.v_head_dim)
        lse = self._kernel(q, k, v, output, batch)
        return blank_output(output, batch), blank_lse(lse, batch)

    def _kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        """Write ``output`` [T, N, V], packed; return the LSE [N, T]."""
        raise NotImplementedError(f"CUDNN is a family of kernels: choose one of {', '.join(self.variants)}")


def _lengths(start_loc: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, 1] int32."""
    return start_loc.diff().view(-1, 1, 1, 1)


def _offsets(start_loc: torch.Tensor, token_stride: int) -> torch.Tensor:
    """[B + 1, 1, 1, 1] int64, in elements."""
    return (start_loc.long() * token_stride).view(-1, 1, 1, 1)


class _Key(NamedTuple):
    """All that a plan depends on."""

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


class _Plan(NamedTuple):
    """A built graph, its operands by name, and its scratch size."""

    graph: Any
    operands: dict[str, Any]
    workspace_bytes: int
    name: str


class CudnnGraph(CudnnPrefillBackend, variant="graph"):
    """One graph of the frontend a shape; plans are kept for the life of the process."""

    libraries: ClassVar[tuple[Library, ...]] = (CUDNN,)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("nvidia-cudnn-frontend", "nvidia-cudnn-cu13"),
        deviations=(_EMPTY, _OFFSETS, _ALIGNED, _FP8_NODE),
    )

    def kernel_evidence(self) -> dict[str, str]:
        """Versions of the frontend and of the library that it loaded."""
        return {**super().kernel_evidence(), "cudnn": str(CUDNN.load().backend_version())}

    def _kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        lse = q.new_empty(q.shape[0], self.num_heads, dtype=torch.float32)
        plan = _plan(self._key(q, k, v, batch))
        self._served = {"plan": plan.name}
        operands = {"q": q, "k": k, "v": v, "o": output, "stats": lse}
        start_loc = {name: batch.key_start_loc if name in "kv" else batch.query_start_loc for name in operands}
        operands |= {f"{name}_at": _offsets(start_loc[name], x.stride(0)) for name, x in operands.items()}
        operands |= {"q_len": _lengths(batch.query_start_loc), "k_len": _lengths(batch.key_start_loc)}
        workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=q.device)
        bound = {plan.operands[name]: tensor for name, tensor in operands.items()}
        plan.graph.execute(bound, workspace, handle=_handle(q.device))
        return lse.mT

    def _key(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch) -> _Key:
        lengths = (len(batch.query_lens), self.num_heads, batch.max_query_len, batch.max_key_len)
        strides = tuple(x.stride() for x in (q, k, v))
        return _Key(q.device, q.dtype, *lengths, (q.shape[-1], v.shape[-1]), strides, self.scale, batch.causal)


@cache
def _create_handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return CUDNN.load().create_handle()


def _handle(device: torch.device) -> Any:
    """The device's handle, on the current stream."""
    handle = _create_handle(device)
    CUDNN.load().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


@cache
def _plan(key: _Key) -> _Plan:
    cudnn: Any = CUDNN.load()
    graph, operands = _graph(key, _handle(key.device))
    graph.build([cudnn.heur_mode.A])
    return _Plan(graph, operands, graph.get_workspace_size(), graph.get_plan_name_at_index(0))


def _graph(key: _Key, handle: Any = None) -> tuple[Any, dict[str, Any]]:
    """The graph and its operands by name; q, k, v, o and stats each have their offsets under ``NAME_at``."""
    cudnn: Any = CUDNN.load()
    io_type = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[key.dtype]
    single, wide = cudnn.data_type.FLOAT, cudnn.data_type.INT64
    options: dict[str, Any] = {"handle": handle} if handle is not None else {}
    graph = cudnn.pygraph(io_data_type=io_type, intermediate_data_type=single, compute_data_type=single, **options)
    operands: dict[str, Any] = {}
    counts = {f"{name}_at": (key.requests + 1, wide) for name in ("q", "k", "v", "o", "stats")}
    counts |= {name: (key.requests, cudnn.data_type.INT32) for name in ("q_len", "k_len")}
    for name, (count, kind) in counts.items():
        operands[name] = graph.tensor(name=name, dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind)
    for name, (shape, stride) in _layouts(key).items():
        operands[name] = graph.tensor(name=name, dim=shape, stride=stride, data_type=io_type)
        operands[name].set_ragged_offset(operands[f"{name}_at"])
    return graph, operands | _attention(graph, operands, key, single)


def _layouts(key: _Key) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Dims [B, N, longest, columns] and strides of q, k and v."""
    lengths = (key.max_query_len, key.max_key_len, key.max_key_len)
    widths = (key.head_dims[0], *key.head_dims)
    return {
        name: ((key.requests, key.heads, length, width), (token * length, head, token, column))
        for name, length, width, (token, head, column) in zip("qkv", lengths, widths, key.strides, strict=True)
    }


def _attention(graph: Any, operands: dict[str, Any], key: _Key, single: Any) -> dict[str, Any]:
    """The attention node's two results, packed [T, N, V] and [T, N]."""
    output, stats = graph.sdpa(
        name="attention",
        q=operands["q"],
        k=operands["k"],
        v=operands["v"],
        attn_scale=key.scale,
        generate_stats=True,
        use_causal_mask=key.causal,
        use_padding_mask=True,
        seq_len_q=operands["q_len"],
        seq_len_kv=operands["k_len"],
    )
    rows, width = (key.requests, key.heads, key.max_query_len), key.head_dims[1]
    per_token = key.heads * width
    output.set_output(True).set_dim((*rows, width)).set_stride((per_token * rows[2], width, per_token, 1))
    output.set_ragged_offset(operands["o_at"])
    stats.set_output(True).set_dim((*rows, 1)).set_stride((key.heads * rows[2], 1, key.heads, 1))
    stats.set_data_type(single).set_ragged_offset(operands["stats_at"])
    return {"o": output, "stats": stats}


class CudnnByFlashInfer(CudnnPrefillBackend, variant="flashinfer"):
    """``flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache``."""

    libraries: ClassVar[tuple[Library, ...]] = (FLASHINFER, CUDNN)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("flashinfer-python", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13"),
        deviations=(
            _EMPTY,
            _OFFSETS,
            _ALIGNED,
            Deviation("LSE padded to [B, longest, N]", "the rows that count are gathered"),
            Deviation("LSE natural in 0.6.13, base 2 by default in 0.7.2", "0.7.2 is asked for the natural one"),
        ),
    )

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """The pairs that its documentation gives."""
        return (dimensions.qk_head_dim, dimensions.v_head_dim) in ((192, 128), (128, 128))

    def kernel_evidence(self) -> dict[str, str]:
        """Versions of FlashInfer, of the frontend and of the library that it loaded."""
        return {**super().kernel_evidence(), "cudnn": str(CUDNN.load().backend_version())}

    def _kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        entry = FLASHINFER.load().cudnn.cudnn_batch_prefill_with_kv_cache
        natural: dict[str, Any] = {"lse_base": "ln"} if "lse_base" in inspect.signature(entry).parameters else {}
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        options = {"causal": batch.causal, "return_lse": True, "out": output, **natural}
        _, padded = entry(q, k, v, self.scale, workspace, **_places(q, k, v, output, batch), **options)
        return _rows_that_count(padded, batch)


def _places(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, batch: RaggedBatch
) -> dict[str, Any]:
    """Lengths and offsets as keywords of FlashInfer's entry."""
    queries, keys = batch.query_start_loc, batch.key_start_loc
    return {
        "max_token_per_sequence": batch.max_query_len,
        "max_sequence_kv": batch.max_key_len,
        "actual_seq_lens_q": _lengths(queries),
        "actual_seq_lens_kv": _lengths(keys),
        "batch_offsets_q": _offsets(queries, q.stride(0)),
        "batch_offsets_o": _offsets(queries, output.stride(0)),
        "batch_offsets_k": _offsets(keys, k.stride(0)),
        "batch_offsets_v": _offsets(keys, v.stride(0)),
    }


def _rows_that_count(padded: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
    """[N, T] of [B, longest, N]."""
    positions = torch.arange(padded.shape[1], device=padded.device)
    return padded[positions < batch.query_start_loc.diff().unsqueeze(1)].mT
