"""From a case to tensors: the inputs of every call, the metadata, and what the caller owns."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from mla_conformance.backends.metadata import (
    MLACommonPrefillMetadata,
    chunked_context_metadata,
    prefill_metadata,
)
from mla_conformance.case import CASE_FORMAT, Call, Case, Layout
from mla_conformance.context import LatentContext, latent_context
from mla_conformance.counter_normal import fill_normal
from mla_conformance.hazards import REGIMES, Regime, Site
from mla_conformance.memory import poison
from mla_conformance.reference.chunking import ContextChunk

TORCH_DTYPES: dict[str, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "e4m3": getattr(torch, "float8_e4m3fn", None),
}
_SLICE_MARGIN = 16
_COUNTED_ELEMENTS = 2**30
"""Elements of the keys from which inputs are drawn on the device, by counters."""


class ProblemError(ValueError):
    """A case that no inputs can be built for."""


@dataclass(frozen=True)
class PrefillCall:
    """One call of the interface.

    Attributes:
        chunk_idx: the context chunk, or None for the new tokens.
        q: [T, N, P + R].
        k: [S, N, P + R].
        v: [S, N, V].
        key_start_loc: first key of each request, and the end.
    """

    chunk_idx: int | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_start_loc: tuple[int, ...]

    @property
    def name(self) -> str:
        """How messages call it."""
        return "new tokens" if self.chunk_idx is None else f"context chunk {self.chunk_idx}"


@dataclass(frozen=True)
class Problem:
    """A case made concrete on one device.

    Attributes:
        case: what it was made from.
        key: the case's id, and how the problem was changed since; equal keys mean equal values.
        device: where the tensors are.
        dtype: dtype of q, k and v.
        query_start_loc: first new token of each request, and the end.
        calls: the calls to make, in order.
        metadata: prepared before the first call.
        output_scale: scale of a quantised output.
    """

    case: Case
    key: str
    device: torch.device
    dtype: torch.dtype
    query_start_loc: tuple[int, ...]
    calls: tuple[PrefillCall, ...]
    metadata: MLACommonPrefillMetadata
    output_scale: torch.Tensor | None

    @property
    def caller_owned(self) -> dict[str, torch.Tensor]:
        """Every tensor that a backend may read and must not write, by name."""
        owned = {f"{name} of {call.name}": getattr(call, name) for call in self.calls for name in ("q", "k", "v")}
        owned["query_start_loc"] = self.metadata.query_start_loc
        owned["block_table"] = self.metadata.block_table
        context = self.metadata.chunked_context
        if context is not None:
            owned |= {name: getattr(context, name) for name in ("cu_seq_lens", "starts", "seq_lens", "workspace")}
        if self.output_scale is not None:
            owned["output_scale"] = self.output_scale
        return owned


def start_loc(lengths: Sequence[int]) -> tuple[int, ...]:
    """Cumulative lengths, 0 first."""
    return tuple(accumulate(lengths, initial=0))


def segments(locations: Sequence[int]) -> Iterator[slice]:
    """One slice per request."""
    return (slice(a, b) for a, b in pairwise(locations))


def build_problem(case: Case, device: torch.device) -> Problem:
    """The inputs that a case stands for; the same bytes on every device.

    Raises:
        ProblemError: a regime or dtype that does not exist here.
        ValueError: the reference's chunk planner or cache refuses the case.
    """
    builder = _Builder(case, device)
    calls, context = builder.calls()
    if context is None:
        chunks: Sequence[ContextChunk] = one_chunk(case.kv) if case.call == Call.CONTEXT_CHUNK else ()
        metadata = assemble_metadata(case, case.q, chunks, builder.dtype, device)
    else:
        metadata = assemble_metadata(case, case.q, context.chunks, builder.dtype, device, context)
    scale = torch.tensor(case.oscale / 1e6, dtype=torch.float32, device=device) if case.quant == "fp8" else None
    return Problem(case, case.id, device, builder.dtype, start_loc(case.q), calls, metadata, scale)


def one_chunk(lengths: Sequence[int]) -> tuple[ContextChunk, ...]:
    """The plan whose only chunk holds every request's whole context."""
    return (ContextChunk((0,) * len(lengths), tuple(lengths)),)


def assemble_metadata(
    case: Case,
    query_lens: Sequence[int],
    chunks: Sequence[ContextChunk],
    dtype: torch.dtype,
    device: torch.device,
    context: LatentContext | None = None,
) -> MLACommonPrefillMetadata:
    """Metadata of a batch; its maxima are inflated as the case says."""
    width = case.kv_lora_rank + case.dimensions.qk_rope_head_dim
    largest = max((chunk.num_tokens for chunk in chunks), default=0)
    workspace = context.workspace if context else poison((max(1, largest), width), dtype, device, case.poison)
    planned = chunked_context_metadata(chunks, workspace, device) if chunks else None
    if planned is not None:
        planned.max_seq_lens = [length * case.inflate for length in planned.max_seq_lens]
    blocks = context.block_table if context else torch.zeros(len(query_lens), 1, dtype=torch.int32, device=device)
    metadata = prefill_metadata(query_lens, block_table=blocks, dtype=dtype, device=device, chunked_context=planned)
    metadata.max_query_len *= case.inflate
    return metadata


class _Builder:
    def __init__(self, case: Case, device: torch.device) -> None:
        if case.data not in REGIMES:
            raise ProblemError(f"unknown data regime {case.data!r}; expected one of {', '.join(REGIMES)}")
        dtype = TORCH_DTYPES[case.dtype]
        if dtype is None:
            raise ProblemError(f"dtype {case.dtype} needs a torch with float8, this is {torch.__version__}")
        self.case, self.device, self.dtype = case, device, dtype
        self.regime: Regime = REGIMES[case.data]
        self.generator = torch.Generator().manual_seed(_seed(case))

    def calls(self) -> tuple[tuple[PrefillCall, ...], LatentContext | None]:
        if self.case.call == Call.CHUNKED_CONTEXT:
            return self._chunked()
        chunk_idx, lengths = (None, self.case.q) if self.case.call == Call.NEW_TOKENS else (0, self.case.kv)
        keys = start_loc(lengths)
        k, v = self._random_keys(keys[-1])
        q = self._queries([k[keys_of] for keys_of in segments(keys)])
        return (self._call(chunk_idx, q, k, v, keys),), None

    def _chunked(self) -> tuple[tuple[PrefillCall, ...], LatentContext]:
        context = latent_context(self.case, self.dtype, self.device, self.generator, self.regime)
        new, chunks = context.new_tokens, context.chunk_keys
        locations = [chunk.key_start_loc for chunk in context.chunks]
        queries = start_loc(self.case.q)
        per_request = [
            torch.cat([k[loc[r] : loc[r + 1]] for (k, _), loc in zip(chunks, locations, strict=True)] + [new[0][rows]])
            for r, rows in enumerate(segments(queries))
        ]
        q = self._queries(per_request)
        calls = [self._call(None, q, *new, queries)]
        calls += [
            self._call(index, q, k, v, tuple(loc))
            for index, ((k, v), loc) in enumerate(zip(chunks, locations, strict=True))
        ]
        return tuple(calls), context

    def _random_keys(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        dims = self.case.dimensions
        k = self._normal(tokens, self.case.heads, dims.qk_head_dim)
        v = self._normal(tokens, self.case.heads, dims.v_head_dim)
        return self.regime.keys(k).to(self.dtype), self.regime.values(v).to(self.dtype)

    def _normal(self, *shape: int) -> torch.Tensor:
        if math.prod(shape) < _COUNTED_ELEMENTS:
            return torch.randn(*shape, generator=self.generator)
        seed = int(torch.randint(2**20, (), generator=self.generator))
        return fill_normal(torch.empty(shape, dtype=self.dtype, device=self.device), seed)

    def _queries(self, keys: list[torch.Tensor]) -> torch.Tensor:
        """[T, N, P + R] in the model's dtype on the CPU."""
        case = self.case
        q = torch.randn(sum(case.q), case.heads, case.dimensions.qk_head_dim, generator=self.generator)
        for rows, k in zip(segments(start_loc(case.q)), keys, strict=True):
            site = Site(q[rows], k, case.softmax_scale, _edges(k.shape[0], case))
            q[rows] = self.regime.queries(site)
        return q.to(self.dtype)

    def _call(
        self, chunk_idx: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: tuple[int, ...]
    ) -> PrefillCall:
        q, k, v = (self._padded(x.to(self.device)) for x in (q, k, v))
        q, k, v = (_lay_out(name, x, k, self.case) for name, x in (("q", q), ("k", k), ("v", v)))
        return PrefillCall(chunk_idx, q, k, v, keys)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        if not self.case.pad:
            return x
        return torch.cat([x, poison((self.case.pad, *x.shape[1:]), x.dtype, x.device, self.case.poison)])


def _edges(keys: int, case: Case) -> list[int]:
    """Key positions next to a boundary, most telling first."""
    candidates = [keys - 1, 0, case.page - 1, case.page, case.workspace - 1, case.workspace]
    candidates += [keys // 2, 127, 128, 63, 64, keys - 2, 255, 256, keys // 3]
    return [position for position in dict.fromkeys(candidates) if 0 <= position < keys]


def _lay_out(name: str, x: torch.Tensor, k: torch.Tensor, case: Case) -> torch.Tensor:
    """``x`` [tokens, N, width] with the same values in another memory layout."""
    layout = Layout(case.layout)
    if layout is Layout.ODD or (layout is Layout.SLICED and name != "v"):
        before, after = (1, 2) if layout is Layout.ODD else (_SLICE_MARGIN, _SLICE_MARGIN)
        wide = poison((*x.shape[:2], before + x.shape[2] + after), x.dtype, x.device, case.poison)
        view = wide[..., before : before + x.shape[2]]
        return view.copy_(x)
    if name == "v" and layout is not Layout.PACKED:
        # The model's own case: v is the second half of each head's kv_b_proj output, behind k_nope.
        wide = torch.cat([k[..., : case.dimensions.qk_nope_head_dim], x], dim=-1)
        return wide[..., wide.shape[-1] - x.shape[-1] :]
    if layout is Layout.HEADS_FIRST and name == "q":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.contiguous()


def _seed(case: Case) -> int:
    """The same numbers for every memory layout, chunking and dtype of the same shapes."""
    drawn = (CASE_FORMAT, case.dims, case.heads, case.q, case.kv, case.seed)
    return int.from_bytes(hashlib.sha256(repr(drawn).encode()).digest()[:7], "big")
