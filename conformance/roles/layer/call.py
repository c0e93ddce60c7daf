"""A call of a layer, and its weights as a model holds them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.layer.mla_batch import LayerRequest
from mla_conformance.problems.calls import AttentionOperands, CallOfARank, CallOnRanks
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import ProblemError, rows_of, start_loc
from mla_conformance.problems.written import CacheImage
from mla_conformance.reference.chunking import PLANNERS, ContextChunk, plan_context_chunks
from mla_conformance.reference.projections import Projection
from mla_conformance.roles.layer.case import LayerCase


class Linear:
    """A linear layer as vLLM has them: called, it returns its bias as well."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # [out, in]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.mT, None


class PackedLinear:
    """The same with its weight in codes, under the name that packed formats have for it."""

    def __init__(self, dense: Linear) -> None:
        largest = float(dense.weight.abs().max())
        self.unit = 2.0 ** math.ceil(math.log2(largest / 127))  # what a code of 1 stands for
        self.qweight = (dense.weight / self.unit).to(torch.int8)  # [out, in]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ (self.qweight.to(x.dtype) * self.unit).mT, None


@dataclass(frozen=True, kw_only=True)
class LayerCall(CallOfARank):
    """``forward`` of a layer; q, k and v are what it means: [T, N, P + R], [S, N, P + R] and [S, N, V] in float64.

    Its heads are those of its rank, and its requests and cache what that rank holds.
    """

    query: torch.Tensor  # [T, N·(P + R)], as handed over
    kv_c: torch.Tensor  # [T, L]
    k_pe: torch.Tensor  # [T, 1, R]
    weight: torch.Tensor  # [L, N, P + V] float64 of ``kv_b_proj``
    latents: torch.Tensor  # [S, L] float64, what k and v are projected from
    requests: tuple[LayerRequest, ...]  # the batch
    padding: int  # rows of padding behind it; -1 where no graph is used
    padding_counts: bool  # whether the metadata counts these rows, as requests without tokens
    packed: bool = False  # whether ``kv_b_proj`` holds codes under another name
    written: Mapping[str, CacheImage]
    case: LayerCase

    name, returns_lse = "layer", False
    means: ClassVar = {"q": "T", "k": "S", "v": "S", "latents": "S"}

    @property
    def image(self) -> CacheImage:
        return self.written["kv_cache"]

    def owned(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("query", "kv_c", "k_pe")}

    def overwritten(self, other: Self) -> Self:
        mine = super().overwritten(other)
        written = {"kv_cache": replace(other.image, cache=self.image.cache)}
        return replace(other, query=mine.query, kv_c=mine.kv_c, k_pe=mine.k_pe, written=written)

    def regrouped(self, case: LayerCase, requests: Sequence[int], queries: int | None) -> Self:
        """Prefills and decodes each together, without padding."""
        new, every = rows_of(self.query_start_loc, requests), rows_of(self.key_start_loc, requests)
        chosen = tuple(self.requests[request] for request in requests)
        contexts = [request.context_len for request in chosen if request.is_prompt]
        workspace, page = self.case.workspace_tokens, self.case.page
        return replace(
            self,
            **{name: getattr(self, name)[new] for name in ("q", "query", "kv_c", "k_pe")},
            **{name: getattr(self, name)[every] for name in ("k", "v", "latents")},
            query_start_loc=start_loc([request.query_len for request in chosen]),
            key_start_loc=start_loc([request.query_len + request.context_len for request in chosen]),
            requests=chosen,
            padding=-1,
            padding_counts=False,
            written={"kv_cache": self.image.with_only(new)},
            merges=len(plan_context_chunks(contexts, workspace_tokens=workspace, page_size=page)),
        )

    def output_buffer(self) -> Guarded | None:
        if not self.case.out:
            return None
        shape = (self.query.shape[0], self.q.shape[1] * self.v.shape[-1])
        return Guarded.allocate(shape, self.query.dtype, self.query.device)

    def load(self, backend: Any) -> None:
        """Weights alone, where another layer's metadata are to serve: one row of [N·(P + V), L] for each column."""
        weight = self.weight.flatten(1).mT.to(self.query.dtype).to(self.query.device).contiguous()
        backend.load(PackedLinear(Linear(weight)) if self.packed else Linear(weight))

    def prepare(self, backend: Any) -> None:
        self.load(backend)
        backend.prepare(self)

    def on_rank(self, backend: Any) -> Any:
        return self.invoke(backend, None)

    def invoke(self, backend: Any, out: Guarded | None) -> Any:
        """``forward`` on the cache as it was before; its result by heads."""
        self.reset()
        result = backend.forward(self, None if out is None else out.view)
        if isinstance(result, torch.Tensor) and result.shape[0] == self.query.shape[0]:
            result = result[: self.q.shape[0]].unflatten(-1, (self.q.shape[1], -1))
        return result

    def operands(self) -> AttentionOperands:
        """Attention over keys and values as a prefill has them; a decode computes the same."""
        starts, case = (self.query_start_loc, self.key_start_loc), self.case
        value_weights = self.weight[..., -self.v.shape[-1] :].abs().sum(dim=0).clamp(min=1.0).to(self.latents)
        whole = AttentionOperands(
            *(self.q, self.k, self.v, *starts),
            causal=True,
            dequantised=case.holds_codes,
            value_weights=value_weights,
            plans=tuple(map(self._ends, PLANNERS.values())) if self.merges and case.ranks == 1 else (),
        )
        if case.weights == "dense":
            return replace(whole, projection=Projection(self.latents, self.weight.to(self.latents)))
        return whole

    def _ends(self, planner: Callable[..., tuple[ContextChunk, ...]]) -> tuple[tuple[int, ...], ...]:
        prefills = [number for number, request in enumerate(self.requests) if request.is_prompt]
        contexts = [self.requests[number].context_len for number in prefills]
        chunks = planner(contexts, workspace_tokens=self.case.workspace_tokens, page_size=self.case.page)
        ends: list[tuple[int, ...]] = [()] * (len(self.query_start_loc) - 1)  # those of padding among them
        for place, number in enumerate(prefills):
            each = ((chunk.starts[place], chunk.seq_lens[place]) for chunk in chunks)
            ends[number] = tuple(start + length for start, length in each if length)
        return tuple(ends)


@dataclass(frozen=True, kw_only=True)
class RankedCall(CallOnRanks[LayerCall]):
    """What ranks that share the tokens do together: their heads side by side are the result of one rank."""

    @classmethod
    def of(cls, parts: tuple[LayerCall, ...]) -> Self:
        """With the merges of context chunks in a prefill, or of ranks in a decode."""
        return replace(super().of(parts), merges=max(parts[0].merges, len(parts) - 1))

    def regrouped(self, case: LayerCase, requests: Sequence[int], queries: int | None) -> Self:
        """Not here: which entries a rank writes goes by the whole batch."""
        raise ProblemError(f"{case.id}: a batch on ranks cannot be regrouped; expected ranks=1 where requests are")

    def joined(self, results: Sequence[Any]) -> Any:
        expected = (*self.parts[0].q.shape[:2], self.v.shape[-1])
        wrong = [result for result in results if getattr(result, "shape", None) != expected]
        return wrong[0] if wrong else torch.cat(list(results), dim=1)
