"""The golden scores of an indexer's calls."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mla_conformance.judging.expected import Expected
from mla_conformance.judging.judged_rows import choose_rows
from mla_conformance.problems.indexer_call import IndexerCall
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.index_scores import IndexScores, index_scores


@dataclass(frozen=True)
class IndexExpectation(Expected):
    """Golden scores of the judged rows.

    Attributes:
        calls: one per call of the problem.
    """

    calls: tuple[IndexScores, ...]

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that they consist of."""
        return (tensor for scores in self.calls for tensor in vars(scores).values())


def expect_scores(problem: Problem) -> IndexExpectation:
    """The golden scores, computed in float64."""
    rows = choose_rows(problem)
    found = []
    for call in problem.calls:
        assert isinstance(call, IndexerCall)
        starts = {"query_start_loc": call.query_start_loc, "key_start_loc": call.key_start_loc}
        found.append(index_scores(call.q, call.weights, call.k[:, 0], **starts, rows=rows.numbers))
    return IndexExpectation(rows, tuple(found))
