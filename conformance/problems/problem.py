"""From a case to tensors: the inputs of every call, the metadata, and what the caller owns."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.metadata import (
    MLACommonPrefillMetadata,
    chunked_context_metadata,
    prefill_metadata,
)
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.hazards import Site
from mla_conformance.problems.calls import AttentionCall, PrefillCall, Question
from mla_conformance.problems.context import Keys, LatentContext, latent_context
from mla_conformance.problems.counter_normal import fill_normal
from mla_conformance.problems.decode_problem import DecodeBatch
from mla_conformance.problems.layer_problem import LayerBatch
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import TORCH_DTYPES, Draw, ProblemError, edges, lay_out, segments, start_loc
from mla_conformance.reference.chunking import ContextChunk

__all__ = [
    "TORCH_DTYPES",
    "Problem",
    "ProblemError",
    "assemble_metadata",
    "build_problem",
    "segments",
    "start_loc",
]
_COUNTED_ELEMENTS = 2**30
"""Elements of the keys from which inputs are drawn on the device, by counters."""


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
        metadata: of a prefill, prepared before the first call; None where each call has its own.
        output_scale: scale of a quantised output.
        whole: attention to the keys of all calls at once, where it was known before they were divided.
    """

    case: Case
    key: str
    device: torch.device
    dtype: torch.dtype
    query_start_loc: tuple[int, ...]
    calls: tuple[AttentionCall, ...]
    metadata: MLACommonPrefillMetadata | None
    output_scale: torch.Tensor | None
    whole: Question | None = None

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of unquantised results, and of the model behind operands in e4m3."""
        return output_dtype(self.dtype)

    @property
    def is_merged(self) -> bool:
        """Whether the calls attend to parts of the keys, so that their results are merged."""
        return self.case.call == Call.CHUNKED_CONTEXT or self.whole is not None

    @property
    def caller_owned(self) -> dict[str, torch.Tensor]:
        """Every tensor that a backend may read and must not write, by name."""
        owned = {name: tensor for call in self.calls for name, tensor in call.owned().items()}
        if self.metadata is not None:
            owned |= {"query_start_loc": self.metadata.query_start_loc, "block_table": self.metadata.block_table}
        context = self.metadata.chunked_context if self.metadata is not None else None
        if context is not None:
            owned |= {name: getattr(context, name) for name in ("cu_seq_lens", "starts", "seq_lens", "workspace")}
        if self.output_scale is not None:
            owned["output_scale"] = self.output_scale
        return owned

    @property
    def memory(self) -> int:
        """Bytes behind the operands and what they mean."""
        storages = (tensor.untyped_storage() for tensor in self.tensors())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that the problem consists of."""
        yield from self.caller_owned.values()
        for call in self.calls:
            yield from (call.q, call.k, call.v)
        if self.whole is not None:
            yield from (self.whole.q, self.whole.k, self.whole.v)


def build_problem(case: Case, device: torch.device) -> Problem:
    """The inputs that a case stands for; the same bytes on every device.

    Raises:
        ProblemError: a regime or dtype that does not exist here.
        ValueError: the reference's chunk planner or cache refuses the case.
    """
    if case.call == Call.LAYER:
        layer = LayerBatch(case, device)
        return Problem(case, case.id, device, layer.dtype, layer.query_start_loc, (layer.call(),), None, None)
    if case.call == Call.DECODE:
        batch = DecodeBatch(case, device)
        return Problem(
            case, case.id, device, batch.dtype, batch.query_start_loc, batch.calls(), None, None, batch.whole
        )
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
    room = (max(1, largest), width)
    workspace = context.workspace if context else poison(room, output_dtype(dtype), device, case.poison)
    planned = chunked_context_metadata(chunks, workspace, device) if chunks else None
    if planned is not None:
        planned.max_seq_lens = [length * case.inflate for length in planned.max_seq_lens]
    blocks = context.block_table if context else torch.zeros(len(query_lens), 1, dtype=torch.int32, device=device)
    metadata = prefill_metadata(query_lens, block_table=blocks, dtype=dtype, device=device, chunked_context=planned)
    metadata.max_query_len *= case.inflate
    return metadata


class _Builder(Draw):
    def calls(self) -> tuple[tuple[PrefillCall, ...], LatentContext | None]:
        if self.case.call == Call.CHUNKED_CONTEXT:
            return self._chunked()
        chunk_idx, lengths = (None, self.case.q) if self.case.call == Call.NEW_TOKENS else (0, self.case.kv)
        keys = start_loc(lengths)
        k, v = self._random_keys(keys[-1])
        q = self._queries([k[keys_of] for keys_of in segments(keys)])
        return (self._call(chunk_idx, q, k, v, keys),), None

    def _chunked(self) -> tuple[tuple[PrefillCall, ...], LatentContext]:
        # The cache holds the model's dtype; operands in e4m3 are cast from it where the kernel is called.
        context = latent_context(self.case, output_dtype(self.dtype), self.device, self.generator, self.regime)
        new, *chunks = [self._cast(keys) for keys in (context.new_tokens, *context.chunk_keys)]
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

    def _cast(self, keys: Keys) -> Keys:
        k, v = keys
        return k.to(self.dtype), v.to(self.dtype)

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
        """[T, N, P + R] in the operands' dtype on the CPU."""
        case = self.case
        q = torch.randn(sum(case.q), case.heads, case.dimensions.qk_head_dim, generator=self.generator)
        for rows, k in zip(segments(start_loc(case.q)), keys, strict=True):
            site = Site(q[rows], k, case.softmax_scale, edges(k.shape[0], case))
            q[rows] = self.regime.queries(site)
        return q.to(self.dtype)

    def _call(
        self, chunk_idx: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: tuple[int, ...]
    ) -> PrefillCall:
        q, k, v = (self._padded(x.to(self.device)) for x in (q, k, v))
        q, k, v = (lay_out(name, x, k, self.case) for name, x in (("q", q), ("k", k), ("v", v)))
        return PrefillCall(chunk_idx, q, k, v, keys)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        if not self.case.pad:
            return x
        return torch.cat([x, poison((self.case.pad, *x.shape[1:]), x.dtype, x.device, self.case.poison)])
