"""A call of a sparse layer, and what it leaves in the buffer of selected tokens for the layers behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.sparse_layer import MLASparseLayerBackend, MLASparseLayerMetadata, SparseLayerWeights
from mla_conformance.problems.calls import AttentionOperands, CallOfARank
from mla_conformance.problems.memory import Guarded, Written, storage_bytes
from mla_conformance.problems.operands import rows_of
from mla_conformance.problems.written import CacheImage
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse.problem import longest_lists
from mla_conformance.roles.sparse_layer.case import SparseLayerCase


@dataclass(frozen=True)
class SelectedLists(Written):
    """The buffer [T or more, K] int32."""

    lists: torch.Tensor  # [n, K] int32, what the first n rows must name, in any order
    free: torch.Tensor  # [n] bool, rows that no layer need read
    padding: int  # rows behind them that may hold anything
    kept: bool  # whether the layer may not write at all
    starts: tuple[int, ...]  # first row of each request, and n

    expected: ClassVar = ("lists", "free")

    def with_only(self, rows: torch.Tensor, starts: Sequence[int]) -> "SelectedLists":
        self.reset()
        cache = self.cache.clone()
        cache[: len(rows)] = self.cache[rows.to(self.cache.device)]
        lists, free = self.lists[rows.to(self.lists.device)], self.free[rows.to(self.free.device)]
        before = storage_bytes(cache).clone()
        return replace(self, cache=cache, before=before, lists=lists, free=free, padding=0, starts=tuple(starts))

    def difference(self) -> str:
        size = self.cache.element_size()
        row, start = self.cache.shape[1] * size, self.cache.storage_offset() * size
        changed = storage_bytes(self.cache) != self.before
        writable = 0 if self.kept else len(self.lists) + self.padding
        changed[start : start + writable * row] = False
        if bool(changed.any()):
            return f"row {(int(changed.nonzero()[0]) - start) // row} was written, expected it as it was"
        return "" if self.kept else self._wrong()

    def _wrong(self) -> str:
        got, expected = (x.sort(dim=1).values for x in (self.cache[: len(self.lists)], self.lists))
        wrong = (got != expected).any(dim=1) & ~self.free
        if not bool(wrong.any()):
            return ""
        row = int(wrong.nonzero()[0])
        named, wanted = (set(x[row].tolist()) - {NO_KEY} for x in (got, expected))
        request = next(number for number, end in enumerate(self.starts[1:]) if row < end)
        return (
            f"row {row} (query {row - self.starts[request]} of request {request}) names {len(named & wanted)} of "
            f"{len(wanted)} tokens: it lacks {_some(wanted - named)} and has {_some(named - wanted)} instead; "
            f"{int(wrong.sum())} of {len(wrong)} rows are wrong"
        )


def _some(tokens: set[int]) -> str:
    shown = ", ".join(map(str, sorted(tokens)[:4]))
    return (shown + (", …" if len(tokens) > len(shown.split(",")) else "")) or "none"


@dataclass(frozen=True, kw_only=True)
class SparseLayerCall(CallOfARank):
    """``run_sparse_layer``; q, k and v are what it attends with and to, [T, N, P + R], [S, N, P + R] and [S, N, V]."""

    selected: torch.Tensor  # [T, K] int64 rows of k and v, or -1
    weights: SparseLayerWeights  # of the layer
    metadata: MLASparseLayerMetadata
    written: Mapping[str, CacheImage | SelectedLists]
    case: SparseLayerCase

    name, entry = "sparse layer", "run_sparse_layer"
    interface: ClassVar = MLASparseLayerBackend
    means: ClassVar = {"q": "T", "k": "", "v": "", "selected": "T"}  # lists name keys by number: all stay
    takes: ClassVar = ("hidden_states", "positions", "cos_sin_cache", "weights", "metadata")

    @property
    def key_lens(self) -> tuple[int, ...]:
        return longest_lists(self.selected, self.query_start_loc)

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Other requests, without padding; those that decode have to stand first."""
        call, rows = super().regrouped(case, requests, queries), rows_of(self.query_start_loc, requests)
        written = {
            name: image.with_only(rows)
            if isinstance(image, CacheImage)
            else image.with_only(rows, call.query_start_loc)
            for name, image in self.written.items()
        }
        decodes = sum(request < self.metadata.num_decodes for request in requests)
        metadata = replace(call.metadata, num_decodes=decodes)
        return replace(call, key_start_loc=self.key_start_loc, metadata=metadata, written=written)

    def prepare(self, backend: MLASparseLayerBackend) -> None:
        backend.load_weights(self.weights)
        backend.prepare_metadata(self.metadata)

    def invoke(self, backend: MLASparseLayerBackend, out: Guarded | None) -> Any:
        self.reset()
        return self.run(backend)

    def run(self, backend: MLASparseLayerBackend) -> Any:
        """The call on memory as it is; its result by heads and values."""
        return self.by_heads(self.on_rank(backend), self.weights.o_proj)

    def on_rank(self, backend: MLASparseLayerBackend) -> Any:
        caches: dict[str, Any] = {"index_kv_cache": None}
        caches |= {name: image.cache for name, image in self.written.items()}
        return backend.run_sparse_layer(*self.given.values(), **caches)

    def fits(self, result: Any) -> bool:
        hidden = self.weights.o_proj.shape[0]
        return isinstance(result, torch.Tensor) and result.shape == (len(self.hidden_states), hidden)

    def by_heads(self, result: Any, o_proj: torch.Tensor) -> Any:
        """[T, N, V], as the output's weights [hidden, N · V] pick them; what does not fit as it is."""
        if not self.fits(result):
            return result
        factors, columns = o_proj.abs().max(dim=0).values, o_proj.abs().argmax(dim=0)
        signed = torch.copysign(factors, o_proj.gather(0, columns.unsqueeze(0))[0])
        return (result[: len(self.q), columns] / signed.to(result.dtype)).unflatten(1, (-1, self.v.shape[-1]))

    def wrong_writes(self) -> str:
        wrong = ((name, image.difference()) for name, image in self.written.items())
        return next((f"{name}: {what}" for name, what in wrong if what), "")

    def operands(self) -> AttentionOperands:
        """Attention to what is selected; values are picked latents, times 1 at most."""
        ones = torch.ones_like(self.v[0])
        meant = {"dequantised": self.case.holds_codes, "selected": self.selected, "value_weights": ones}
        return self.attended(causal=False, **meant)

    def joined(self, results: Sequence[Any], parts: Sequence[Any]) -> Any:
        """The sum of what ranks that share the heads return."""
        wrong = [result for result in results if not self.fits(result)]
        o_proj = torch.cat([part.weights.o_proj for part in parts], dim=1)
        return wrong[0] if wrong else self.by_heads(sum(results), o_proj)
