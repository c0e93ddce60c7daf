"""Index keys and queries whose best tokens no rounding can confuse.

Tokens come in pairs, the topics. A query is made of whole topics, one or two for each head, so that its tokens score 1
and all others 0. One head is a decoy: it scores a quarter for a topic that is not to be selected, by a large query with
a small weight or a small query with a large one, so that whoever forgets one of the two selects it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TOKENS = 80
"""Tokens of a request that are of a topic, so that their keys are independent of one another."""
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
    """The topics of a request.

    Attributes:
        tokens: [M] positions of the tokens that are of one, ascending; each two are a topic.
    """

    tokens: Tensor

    @staticmethod
    def drawn(total: int, topk: int, generator: torch.Generator) -> "Topics":
        """The first topk + 2 tokens of a request, so that every row that selects has whole topics, and drawn others."""
        first = min(total, topk + 2)
        rest = torch.randperm(total - first, generator=generator)[: MOST_TOKENS - first] + first
        return Topics(torch.cat((torch.arange(first), rest.sort().values)))

    def keys(self, total: int, columns: int, generator: torch.Generator) -> Tensor:
        """[total, columns] integers: keys before their norm, each around a mean of its own.

        Tokens that are of no topic have one of two.
        """
        own = drawn_blocks(total, columns, generator)
        others = torch.ones(total, dtype=torch.bool).index_fill(0, self.tokens, False)
        few = drawn_blocks(_OTHERS, columns, generator)
        own[others] = few[torch.arange(int(others.sum())) % _OTHERS]
        return own + torch.randint(-_MOST_MEAN, _MOST_MEAN + 1, (total, 1), generator=generator)

    def directions(self, keys: Tensor) -> Tensor:
        """[topics, D] queries that score 1 for the tokens of a topic, by all keys [total, D] of the request."""
        topic = torch.full((len(keys),), -1).index_put((self.tokens,), torch.arange(len(self.tokens)) // 2)
        _, first = torch.unique(torch.cat((keys, topic.double().unsqueeze(1)), dim=1), dim=0, return_inverse=True)
        chosen = torch.zeros(int(first.max()) + 1, dtype=torch.long).index_put((first,), torch.arange(len(keys)))
        different, of = keys[chosen], topic[chosen]
        wanted = torch.full((int(topic.max()) + 1, len(different)), _ASIDE, dtype=torch.float64)
        wanted[of[of >= 0], (of >= 0).nonzero()[:, 0]] = 1.0
        return wanted @ torch.linalg.solve(different @ different.mT, different)

    def query(
        self, bound: int, topk: int, heads: int, directions: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Queries [heads, D] and weights [heads] of a row that sees the first ``bound`` tokens."""
        whole, begun = int((self.tokens < bound).sum()) // 2, int((self.tokens < bound).sum() + 1) // 2
        whole = whole if bound > topk else len(directions)
        order = torch.randperm(whole, generator=generator)
        chosen, left = order[: topk // 2], [*order[topk // 2 :].tolist(), *range(whole, begun)]
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
