"""The hidden states of a sparse layer's batch, made so that no rounding changes what is stored or selected.

Everything that stands between two steps is a value of the model's dtype, whatever rounds there: weights pick columns,
latents have a root mean square of a power of two, index keys such a variance, pairs turn by quarters. So the golden
layer in float64, rounded where a layer stores, is the only right one.
"""

from functools import cached_property

import torch
from torch import Tensor

from mla_conformance.cases.grammar import Data
from mla_conformance.problems.cached_batch import CachedBatch
from mla_conformance.problems.operands import ProblemError, segments, start_loc
from mla_conformance.reference.index_scores import IndexScores, index_scores
from mla_conformance.reference.layer import query_latent
from mla_conformance.reference.layer_index import index_keys, index_queries, index_weights
from mla_conformance.reference.prepare_index import Prepared, rotated
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse_layer.case import INDEX_DIM, SparseLayerCase
from mla_conformance.roles.sparse_layer.topics import Topics, drawn_blocks, stacked
from mla_conformance.roles.sparse_layer.weights import DrawnLayer, put

MARGIN = 0.5
"""Of the best score of a row, how far the last selected token stands above the best that is left out."""
_WEIGHTS_SEED = 39
_LEAST = 2.0**-6
"""Of a latent, so that none is a subnormal number."""
_LARGER = 4.0
"""Latents and keys before their norms, so that its epsilon is nothing beside them."""


class HiddenStates(CachedBatch[SparseLayerCase]):
    """Hidden states of a batch and what the golden layer makes of them, all on the CPU."""

    @cached_property
    def layer(self) -> DrawnLayer:
        """The same for all batches of these sizes."""
        return DrawnLayer.draw(self.case, self.drawing(_WEIGHTS_SEED))

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """First new token of each request that is none of padding, and the end."""
        return start_loc(self.case.q)

    @cached_property
    def positions(self) -> Tensor:
        """[S] int64 of all tokens."""
        return torch.cat([torch.arange(total) for total in self.case.totals])

    @cached_property
    def new(self) -> Tensor:
        flags = [torch.arange(total) >= kv for total, kv in zip(self.case.totals, self.case.kv, strict=True)]
        return torch.cat(flags)

    @cached_property
    def topics(self) -> list[Topics]:
        """Those of each request."""
        size = self.case.topk // self.case.topics
        return [Topics.drawn(total, self.case.topk, size, self.generator) for total in self.case.totals]

    @cached_property
    def hidden(self) -> Tensor:
        """[S, hidden] of all tokens in the model's dtype: the columns that are picked, and others."""
        case, layer, tokens = self.case, self.layer, len(self.positions)
        known = self._normed_latents(tokens)
        drawn = torch.randn(tokens, case.hidden_size, generator=self.generator).double()
        keys = [topics.keys(INDEX_DIM, self.generator) for topics in self.topics]
        drawn = put(drawn, layer.weights.W_DKV, known)
        drawn = put(drawn, layer.index.wk, _LARGER * torch.cat(keys))
        asked, weights = self._asked(drawn)
        assert layer.weights.W_DQ is not None
        drawn[self.new] = put(put(drawn[self.new], layer.weights.W_DQ, asked), layer.index.weights_proj, weights)
        return drawn.to(self.dtype)

    def _normed_latents(self, tokens: int) -> Tensor:
        """[S, L] of a root mean square that is a power of two; of a cache of codes they are codes."""
        columns = self.case.kv_lora_rank
        if self.case.holds_codes or self.case.data == Data.INTEGERS:
            return _LARGER * drawn_blocks(tokens, columns, self.generator)
        drawn = torch.randn(tokens, columns, generator=self.generator, dtype=torch.float64)
        return _of_one_size(torch.copysign(drawn.abs().clamp(min=_LEAST), drawn))

    def _asked(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """What latent queries [T, Lq] before their norm and weights [T, H] are to be."""
        case, form, found = self.case, self.layer.index_spec, []
        keys = index_keys(drawn, self.positions, self.layer.index, form).values.to(self.dtype).double()
        for topics, rows, kv in zip(self.topics, segments(start_loc(case.totals)), case.kv, strict=True):
            directions = topics.directions(keys[rows])
            sizes = case.topk, case.queries
            bounds = range(kv + 1, rows.stop - rows.start + 1)
            found += [topics.query(bound, *sizes, directions, self.generator) for bound in bounds]
        q, asked = stacked(found)
        query = torch.arange(case.index_heads) % case.queries
        weights = (asked / query.bincount())[:, query]
        first = (INDEX_DIM - form.rotation.dim) * form.rope_last
        back = form.rotation.table(-self.positions[self.new])
        before = rotated(Prepared.of(q), back, first, form.rotation.interleaved).values.flatten(1)
        normed = put(torch.zeros_like(before), self.layer.index.wq_b[:, : case.queries].flatten(1), before)
        assert self.layer.weights.q_norm is not None
        return _of_one_size(normed / self.layer.weights.q_norm), weights

    @cached_property
    def query_latent(self) -> Tensor:
        """[T, Lq] float64 of the new tokens, as the model's dtype holds it."""
        return query_latent(self.hidden[self.new], self.layer.weights, self.layer.spec).to(self.dtype).double()

    @cached_property
    def keys(self) -> Tensor:
        """[S, D] float64 index keys."""
        return index_keys(self.hidden, self.positions, self.layer.index, self.layer.index_spec).values

    @cached_property
    def scores(self) -> IndexScores:
        """Of the new tokens, which see those before them and their own."""
        layer, new = self.layer, self.new
        q = index_queries(self.query_latent, self.positions[new], layer.index, layer.index_spec).values
        starts = {"query_start_loc": self.counted, "key_start_loc": start_loc(self.case.totals)}
        return index_scores(q, index_weights(self.hidden[new], layer.index), self.keys, **starts)

    @cached_property
    def bounds(self) -> Tensor:
        """[T] int64, tokens that each new one sees."""
        return self.positions[self.new] + 1

    @cached_property
    def lists(self) -> Tensor:
        """[T, K] int64, positions that each new token attends to, -1 behind them."""
        columns, longest = self.case.topk, max(self.case.totals)
        seen = torch.arange(longest) < self.bounds.unsqueeze(1)
        scores = self.scores.scores
        if self.case.shared:
            scores = torch.rand(len(seen), longest, generator=self.generator, dtype=torch.float64)
        best = scores.masked_fill(~seen, -torch.inf).topk(min(columns, longest), dim=1)
        if not self.case.shared:
            self._require_margin(best.values)
        named = best.indices.masked_fill(best.values == -torch.inf, NO_KEY)
        return torch.nn.functional.pad(named, (0, columns - named.shape[1]), value=NO_KEY)

    def _require_margin(self, best: Tensor) -> None:
        """Hold what is left out against what is selected; a score of what is selected is the unit."""
        rows = self.bounds > self.case.topk
        if not bool(rows.any()):
            return
        scores = self.scores.scores.masked_fill(~self.scores.visible, -torch.inf)
        behind = scores.topk(self.case.topk + 1, dim=1).values[rows, -1]
        gap = (best[rows, -1] - behind) / best[rows, 0]
        if float(gap.min()) < MARGIN:
            raise ProblemError(f"{self.case.id}: expected scores {MARGIN} apart, got {float(gap.min()):.3f}")


def _of_one_size(x: Tensor) -> Tensor:
    return _LARGER * x / x.square().mean(dim=-1, keepdim=True).sqrt()
