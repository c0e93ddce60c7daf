"""Index keys and queries whose best tokens no rounding can confuse.

The tokens of a request are in topics: pairs, or where many are selected as many as it takes, four topics side by side.
A query is made of whole topics, one or two for each head, so that their tokens score 1 and all others 0. One head is a
decoy: it scores a quarter for a topic that is not to be selected, by a large query with a small weight or a small query
with a large one, so that whoever forgets one of the two selects it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_PAIR, _ABREAST = 2, 4
_MOST_KEYS = 80
"""Different keys of the tokens of a request that are of a topic, so that they are independent of one another."""
_OTHERS = 2
"""Different keys of the tokens that are of none."""
_MOST_MEAN = 3
_ASIDE = -0.1
"""What a topic's query and the key of another token make."""
_DECOYS = ((8.0, 2.0**-5), (2.0**-5, 8.0))
"""Size of a decoy's query, and its weight."""
_BLOCK = (7, *[2] * 16, *[1] * 15)
"""Magnitudes of half a block of 64 columns, of which the other half has the negative: their mean square is 4."""


def drawn_blocks(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns] float64 integers of mean 0 and mean square 4 in every 64 columns; a norm of them rounds nothing.

    Divided by a power of two they are e4m3 codes under the scale of a largest magnitude of 7.
    """
    block = torch.tensor([*_BLOCK, *(-x for x in _BLOCK)], dtype=torch.float64)
    order = torch.rand(rows, columns // len(block), len(block), generator=generator).argsort(dim=-1)
    return block[order].flatten(1)


@dataclass(frozen=True)
class Topics:
    """The topics of a request, in the order in which they are complete."""

    of: Tensor  # [total] the topic of each token, -1 of none
    size: int  # tokens of a topic; those of a pair have keys of their own, those of a larger one the same

    @staticmethod
    def drawn(total: int, topk: int, size: int, generator: torch.Generator) -> "Topics":
        """Of the first tokens, so that every row that selects has whole topics; pairs also of some behind them."""
        at = torch.arange(total)
        if size > _PAIR:  # side by side, since pairs turn back after four tokens: so a topic has one key
            topic = at // (_ABREAST * size) * _ABREAST + at % _ABREAST
            return Topics(topic.masked_fill(topic >= _MOST_KEYS, -1), size)
        first = min(total, topk + _PAIR)
        rest = torch.randperm(total - first, generator=generator)[: _MOST_KEYS - first] + first
        tokens = torch.cat((at[:first], rest.sort().values))
        return Topics(torch.full((total,), -1).index_put((tokens,), torch.arange(len(tokens)) // _PAIR), size)

    @cached_property
    def first(self) -> Tensor:
        """[topics], the first token of each."""
        named = self.of >= 0
        start = torch.full((int(self.of.max()) + 1,), len(self.of))
        return start.scatter_reduce(0, self.of[named], named.nonzero()[:, 0], "amin")

    @cached_property
    def last(self) -> Tensor:
        """[topics], the last token of each; behind all tokens of one that the request does not complete."""
        named = self.of >= 0
        end = torch.zeros_like(self.first).scatter_reduce(0, self.of[named], named.nonzero()[:, 0], "amax")
        return end.where(torch.bincount(self.of[named]) == self.size, len(self.of))

    def keys(self, columns: int, generator: torch.Generator) -> Tensor:
        """[total, columns] integers: keys before their norm, each around a mean of its own.

        Tokens that are of no topic have one of two.
        """
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
    ) -> tuple[Tensor, Tensor]:
        """Queries [heads, D] and weights [heads] of a row that sees the first ``bound`` tokens."""
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


def stacked(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] and weights [T, H]."""
    queries, weights = zip(*rows, strict=True)
    return torch.stack(queries), torch.stack(weights)
