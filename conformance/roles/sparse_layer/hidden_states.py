"""The weights and hidden states of a sparse layer's batch, made so that no rounding changes what is stored or selected.

Everything that stands between two steps is a value of the model's dtype, whatever rounds there: weights pick columns,
latents have a root mean square of a power of two, index keys such a variance, pairs turn by quarters. So the golden
layer in float64, rounded where a layer stores, is the only right one.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from mla_conformance.cases.grammar import Data
from mla_conformance.problems.cached_batch import CachedBatch
from mla_conformance.problems.operands import ProblemError, segments, start_loc
from mla_conformance.reference import cache_layout, dimensions, indexer, projections
from mla_conformance.reference.projections import MLAWeights, Rotation
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.layer.problem import selection
from mla_conformance.roles.sparse_layer.case import INDEX_DIM, SparseLayerCase

EPSILON = 1e-6
_QUARTERS = (1, 2, 3)  # quarters of a turn in which pairs turn from token to token, so that a rotation rounds nothing
_PAIR, _ABREAST = 2, 4
_MOST_KEYS = 80
"""Different keys of the tokens of a request that are of a topic, so that they are independent of one another."""
_OTHERS = 2  # different keys of the tokens that are of none
_MOST_MEAN = 3
_ASIDE = -0.1  # what a topic's query and the key of another token make
_DECOYS = ((8.0, 2.0**-5), (2.0**-5, 8.0))  # size of a decoy's query, and its weight
_OF_ANOTHER = 2.0**-6  # of the weight of a query, what each head has that has it as well as the one that decides
_BLOCK = (7, *[2] * 16, *[1] * 15)
"""Magnitudes of half a block of 64 columns, of which the other half has the negative: their mean square is 4."""

MARGIN = 0.5  # of the best score of a row, how far the last selected token stands above the best that is left out
_MOST_DRAWS = 4
_LEAST = 2.0**-6  # of a latent, so that none is a subnormal number
_LARGER = 4.0  # latents and keys before their norms, so that its epsilon is nothing beside them


def drawn_blocks(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns] integers of mean 0 and mean square 4 in every 64, which neither norms nor e4m3 round."""
    block = torch.tensor([*_BLOCK, *(-x for x in _BLOCK)], dtype=torch.float64)
    order = torch.rand(rows, columns // len(block), len(block), generator=generator).argsort(dim=-1)
    return block[order].flatten(1)


@dataclass(frozen=True)
class Topics:
    """Index keys and queries whose best tokens no rounding can confuse: the topics of a request, as they are complete.

    Tokens are in topics: pairs, or where many are selected as many as it takes, four topics side by side. A query is
    made of whole topics, one or two for each head, so that their tokens score 1 and all others 0. One head is a decoy:
    it scores a quarter for a topic that is not to be selected, by a large query with a small weight or a small query
    with a large one, so that whoever forgets one of the two selects it.
    """

    of: Tensor  # [total] the topic of each token, -1 of none
    size: int  # tokens of a topic; those of a pair have keys of their own, those of a larger one the same
    first: Tensor  # [topics], the first token of each
    last: Tensor  # [topics], the last token of each; behind all tokens of one that the request does not complete

    @staticmethod
    def drawn(total: int, topk: int, size: int, generator: torch.Generator) -> "Topics":
        """Of the first tokens, so that every row that selects has whole topics; pairs also of some behind them."""
        at = torch.arange(total)
        if size > _PAIR:  # side by side, since pairs turn back after four tokens: so a topic has one key
            topic = at // (_ABREAST * size) * _ABREAST + at % _ABREAST
            of = topic.masked_fill(topic >= _MOST_KEYS, -1)
        else:
            begun = min(total, topk + _PAIR)
            rest = torch.randperm(total - begun, generator=generator)[: _MOST_KEYS - begun] + begun
            tokens = torch.cat((at[:begun], rest.sort().values))
            of = torch.full((total,), -1).index_put((tokens,), torch.arange(len(tokens)) // _PAIR)
        own, number = of[of >= 0], at[of >= 0]
        first = torch.full((int(of.max()) + 1,), total).scatter_reduce(0, own, number, "amin")
        last = torch.zeros_like(first).scatter_reduce(0, own, number, "amax")
        return Topics(of, size, first, last.where(torch.bincount(own) == size, total))

    def keys(self, columns: int, generator: torch.Generator) -> Tensor:
        """[total, columns] integers before a norm, each around its own mean; without a topic one of two."""
        total, others = len(self.of), self.of < 0
        own, few = (drawn_blocks(rows, columns, generator) for rows in (total, _OTHERS))
        if self.size > _PAIR:
            own = own[self.first[self.of.clamp(min=0)]]
        own[others] = few[torch.arange(int(others.sum())) % _OTHERS]
        return own + torch.randint(-_MOST_MEAN, _MOST_MEAN + 1, (total, 1), generator=generator)

    def directions(self, keys: Tensor) -> Tensor:
        """[topics, D] queries that score 1 for the tokens of a topic, by all keys [total, D] of the request."""
        labelled = torch.cat((keys, self.of.double().unsqueeze(1)), dim=1)
        _, same = torch.unique(labelled, dim=0, return_inverse=True)
        chosen = torch.zeros(int(same.max()) + 1, dtype=torch.long).index_put((same,), torch.arange(len(keys)))
        different, of = keys[chosen], self.of[chosen]
        wanted = torch.full((len(self.first), len(different)), _ASIDE, dtype=torch.float64)
        wanted[of[of >= 0], (of >= 0).nonzero()[:, 0]] = 1.0
        return wanted @ torch.linalg.solve(different @ different.mT, different)

    def query(
        self, bound: int, topk: int, heads: int, directions: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:  # queries [heads, D] and weights [heads] of a row that sees the first ``bound`` tokens
        whole, begun = (int((ends < bound).sum()) for ends in (self.last, self.first))
        order = torch.randperm(whole if bound > topk else len(directions), generator=generator)
        chosen, rest = order.tensor_split([topk // self.size])
        left = [*rest.tolist(), *range(whole, begun)]
        query = torch.zeros(heads, directions.shape[1], dtype=torch.float64)
        # Of few topics, which a row that sees no more tokens than it selects may have, some are asked for twice.
        asked = torch.arange(max(len(chosen), heads - 1))
        query.index_add_(0, asked % (heads - 1), directions[chosen[asked % len(chosen)]])
        size, weight = _DECOYS[int(torch.randint(2, (), generator=generator))]
        query[-1] = size * directions[left[0]] if left else query[0]
        weights = torch.ones(heads, dtype=torch.float64)
        weights[-1] = weight
        place = torch.randperm(heads, generator=generator)
        return query[place], weights[place]


@lru_cache(maxsize=1)  # for the batches of one layer: hundreds of MB, which nobody writes
def _weights(
    head: dimensions.MLADimensions, sizes: tuple[int, ...], seed: int
) -> tuple[MLAWeights, projections.IndexerWeights, tuple[float, ...]]:
    """Weights of the attention and of the indexer, float64 on the CPU, and by how much each pair turns."""
    hidden, heads, latent, index_heads, queries = sizes
    rope, query, generator = head.qk_rope_head_dim, queries * INDEX_DIM, torch.Generator().manual_seed(seed)
    parts = (query, latent, rope, INDEX_DIM, index_heads)
    w_dq, w_dkv, w_kr, wk, weights_proj = _picks(hidden, sum(parts), generator).split(parts, dim=1)
    weights = MLAWeights(
        W_DQ=w_dq,
        W_UQ=selection(query, heads, head.qk_nope_head_dim, generator),
        W_QR=selection(query, heads, rope, generator),
        W_DKV=w_dkv,
        W_UK=selection(latent, heads, head.qk_nope_head_dim, generator),
        W_KR=w_kr,
        W_UV=selection(latent, heads, head.v_head_dim, generator),
        W_O=_picks(hidden, heads * head.v_head_dim, generator).mT,
        q_norm=_powers(query, (0.25, 1.0, 4.0), generator),
        kv_norm=_powers(latent, (1.0, 2.0), generator),
    )
    every = _picks(query, query, generator).unflatten(1, (queries, INDEX_DIM))
    index = projections.IndexerWeights(
        wq_b=every[:, torch.arange(index_heads) % queries],
        wk=wk,
        k_norm=_powers(INDEX_DIM, (0.5, 1.0, 2.0), generator),
        k_norm_bias=_powers(INDEX_DIM, (-0.75, 0.0, 0.75), generator),
        weights_proj=weights_proj,
    )
    drawn = torch.randint(len(_QUARTERS), (rope // 2,), generator=generator).tolist()
    return weights, index, tuple(_QUARTERS[number] * math.pi / 2 for number in drawn)


def put(x: Tensor, picks: Tensor, values: Tensor) -> Tensor:
    """Rows [T, in] of which weights [in, out] pick these values [T, out]; other columns stay as they are."""
    rows, columns = picks.nonzero(as_tuple=True)  # one of each column
    rows = rows[columns.argsort()]
    return x.index_copy(1, rows, values / picks[rows, torch.arange(picks.shape[1])])


def _picks(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return selection(rows, 1, columns, generator)[:, 0]


def _powers(columns: int, values: tuple[float, ...], generator: torch.Generator) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (columns,), generator=generator)]


class HiddenStates(CachedBatch[SparseLayerCase]):
    def __init__(self, case: SparseLayerCase, device: torch.device, salt: str = "") -> None:
        super().__init__(case, device, salt)
        # The layer as the reference has it.
        sizes = (case.hidden_size, case.heads, case.kv_lora_rank, case.index_heads, case.queries)
        self.weights, self.index, turns = _weights(case.dimensions, sizes, self.drawing(39).initial_seed())
        rotation = Rotation(frequencies=turns, interleaved=case.layer_pairs == "neighbours")
        self.spec = projections.LayerSpec(rotation=rotation, q_norm=EPSILON, kv_norm=EPSILON)
        rotation = replace(rotation, interleaved=case.pairs == "neighbours")
        self.index_spec = projections.IndexerSpec(rotation=rotation, rope_last=case.rope_last, epsilon=EPSILON)
        self.counted = start_loc(case.q)  # first new token of each request that is none of padding, and the end
        self.positions = torch.cat([torch.arange(total) for total in case.totals])
        self.new = new = self.new_of(map(torch.arange, case.totals))
        # Hidden states [S, hidden] in the model's dtype, drawn again where an index cache's rounding could matter, and
        # what they are indexed by, float64: queries [T, H, D] and weights [T, H] of the new tokens, keys [S, D] of all.
        for _ in range(_MOST_DRAWS):
            self.hidden = hidden = self._drawn()
            q = projections.index_queries(
                self.query_latent(hidden), self.positions[new], self.index, self.index_spec
            ).values
            self.keys = projections.index_keys(hidden, self.positions, self.index, self.index_spec).values
            weights = projections.index_weights(hidden[new], self.index)
            if case.shared or (gap := self._gap(q, weights, self.keys)) >= MARGIN:
                break
        else:
            raise ProblemError(f"{case.id}: expected scores {MARGIN} apart, got {gap:.3f}")
        # [T, K] int64, positions that each new token attends to, -1 behind them.
        longest = max(case.totals)
        seen = torch.arange(longest) < (self.positions[new] + 1).unsqueeze(1)
        if case.shared:
            scores = torch.rand(len(seen), longest, generator=self.generator, dtype=torch.float64)
        else:
            scores = self._scored(q, weights, self.keys).scores
        best = scores.masked_fill(~seen, -torch.inf).topk(min(case.topk, longest), dim=1)
        named = best.indices.masked_fill(best.values == -torch.inf, NO_KEY)
        self.lists = torch.nn.functional.pad(named, (0, case.topk - named.shape[1]), value=NO_KEY)

    def _drawn(self) -> Tensor:
        case, tokens = self.case, len(self.positions)
        # Latents have a root mean square that is a power of two; of a cache of codes they are codes.
        if case.holds_codes or case.data == Data.INTEGERS:
            known = _LARGER * drawn_blocks(tokens, case.kv_lora_rank, self.generator)
        else:
            known = torch.randn(tokens, case.kv_lora_rank, generator=self.generator, dtype=torch.float64)
            known = _of_one_size(torch.copysign(known.abs().clamp(min=_LEAST), known))
        drawn = torch.randn(tokens, case.hidden_size, generator=self.generator).double()
        size = case.topk // case.topics
        of_requests = [Topics.drawn(total, case.topk, size, self.generator) for total in case.totals]
        keys = [topics.keys(INDEX_DIM, self.generator) for topics in of_requests]
        drawn = put(drawn, self.weights.W_DKV, known)
        drawn = put(drawn, self.index.wk, _LARGER * torch.cat(keys))
        # What latent queries [T, Lq] before their norm and weights [T, H] are to be.
        form, found = self.index_spec, []
        stored = projections.index_keys(drawn, self.positions, self.index, form).values.to(self.dtype).double()
        for topics, rows, kv in zip(of_requests, segments(start_loc(case.totals)), case.kv, strict=True):
            directions = topics.directions(stored[rows])
            sizes = case.topk, case.queries
            bounds = range(kv + 1, rows.stop - rows.start + 1)
            found += [topics.query(bound, *sizes, directions, self.generator) for bound in bounds]
        q, asked = (torch.stack(rows) for rows in zip(*found, strict=True))  # [T, H, D] and [T, H]
        query = torch.arange(case.index_heads) % case.queries
        # Of the heads that have a query one decides, another one in each row, so that no share of them can do for all.
        replicas = query.bincount()
        deciding = torch.rand(asked.shape, generator=self.generator, dtype=torch.float64).mul(replicas).long()
        deciding = deciding * case.queries + torch.arange(case.queries)
        weights = _OF_ANOTHER * asked[:, query]
        weights.scatter_(1, deciding, asked * (1 - _OF_ANOTHER * (replicas - 1)))
        first = (INDEX_DIM - form.rotation.dim) * form.rope_last
        back = form.rotation.table(-self.positions[self.new])
        before = indexer.rotated(indexer.Prepared.of(q), back, first, form.rotation.interleaved).values.flatten(1)
        normed = put(torch.zeros_like(before), self.index.wq_b[:, : case.queries].flatten(1), before)
        assert self.weights.W_DQ is not None and self.weights.q_norm is not None
        latent = put(drawn[self.new], self.weights.W_DQ, _of_one_size(normed / self.weights.q_norm))
        drawn[self.new] = put(latent, self.index.weights_proj, weights)
        return drawn.to(self.dtype)

    def _gap(self, q: Tensor, weights: Tensor, k: Tensor) -> float:
        """How far the last selected score exceeds the best one left out, in rows' best scores; also as stored."""
        columns, golden = self.case.topk, self._scored(q, weights, k)
        rows = golden.bounds > columns
        if not bool(rows.any()):
            return torch.inf
        best = golden.scores.topk(columns, dim=1)
        selected = torch.zeros_like(golden.visible).scatter(1, best.indices, value=True)
        stored = self._scored(self._stored(q.flatten(0, 1)).view_as(q), weights, self._stored(k))
        gaps = []
        for scores in (golden.scores, stored.scores):
            last, behind = scores.where(selected, torch.inf).amin(1), scores.where(~selected, -torch.inf).amax(1)
            gaps.append(float(((last - behind) / best.values[:, 0])[rows].min()))
        return min(gaps)

    def _stored(self, x: Tensor) -> Tensor:
        case, x = self.case, x.to(self.dtype)
        entries = cache_layout.encode(x, x[:, :0], case.index_cache, case.cache_scale, case.index_scales)
        return cache_layout.decode_rows(entries, case.index_cache, case.cache_scale, INDEX_DIM, 0)[0]

    def query_latent(self, hidden: Tensor) -> Tensor:
        """[T, Lq] float64 of the new tokens, as the model's dtype holds it."""
        return projections.query_latent(hidden[self.new], self.weights, self.spec).to(self.dtype).double()

    def _scored(self, q: Tensor, weights: Tensor, k: Tensor) -> indexer.IndexScores:
        starts = {"query_start_loc": self.counted, "key_start_loc": start_loc(self.case.totals)}
        return indexer.index_scores(q, weights, k, **starts)


def _of_one_size(x: Tensor) -> Tensor:
    return _LARGER * x / x.square().mean(dim=-1, keepdim=True).sqrt()
