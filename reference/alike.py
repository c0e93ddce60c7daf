"""Consecutive requests of one shape, computed as one request of as many times the heads.

Attention knows no other heads, and a batch of thousands of small requests, one after the other, is slow everywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from torch import Tensor

from mla_conformance.reference.attention import (
    WORKSPACE_ELEMENTS,
    AttentionState,
    ErrorTerms,
    check_operands,
    concatenate,
    segments,
)


def by_shape(
    attend: Callable[..., AttentionState],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Sequence[int],
    key_start_loc: Sequence[int],
) -> AttentionState:
    """What ``attend``, which is `attention` with all its other arguments, returns for a batch.

    To float64 rounding; for a request unlike its neighbours exactly. Raises ValueError as `attention` does.
    """
    check_operands(q, k, v, query_start_loc, key_start_loc)
    heads, states = q.shape[1], []
    for queries, keys, count in _runs(query_start_loc, key_start_loc, heads, q.shape[2]):
        operands = [_as_heads(x[rows], heads, count) for x, rows in ((q, queries), (k, keys), (v, keys))]
        ends = operands[0].shape[0], operands[1].shape[0]
        state = attend(*operands, query_start_loc=(0, ends[0]), key_start_loc=(0, ends[1]))
        states.append(_as_requests(state, count))
    return concatenate(states)


def _runs(
    query_start_loc: Sequence[int], key_start_loc: Sequence[int], heads: int, width: int
) -> Iterator[tuple[slice, slice, int]]:
    """Rows, keys and number of consecutive requests of one shape, as many as the definition's workspace holds."""
    requests = zip(segments(query_start_loc), segments(key_start_loc), strict=True)
    for (q_len, kv_len), alike in groupby(requests, lambda rows: tuple(x.stop - x.start for x in rows)):
        run = list(alike)
        most = max(1, WORKSPACE_ELEMENTS // max(1, heads * (q_len * kv_len + (q_len + kv_len) * width)))
        for part in (run[at : at + most] for at in range(0, len(run), most)):
            (first_queries, first_keys), (last_queries, last_keys) = part[0], part[-1]
            rows = slice(first_queries.start, last_queries.stop), slice(first_keys.start, last_keys.stop)
            yield *rows, len(part)


def _as_heads(x: Tensor, heads: int, count: int) -> Tensor:
    """[count · tokens, N or 1, D] as [tokens, count · N, D]; one request as it is, whose heads may share a key."""
    if count == 1:
        return x
    return x.expand(-1, heads, -1).unflatten(0, (count, x.shape[0] // count)).transpose(0, 1).flatten(1, 2)


def _as_requests(state: AttentionState, count: int) -> AttentionState:
    """The way back: of [tokens, count · N, …] the state of [count · tokens, N, …]."""

    def back(x: Tensor) -> Tensor:
        return x.unflatten(1, (count, x.shape[1] // count)).transpose(0, 1).flatten(0, 1)

    terms = state.terms and ErrorTerms(
        **{name: back(x.mT).mT if name == "lse_score" else back(x) for name, x in state.terms.by_name().items()}
    )
    return AttentionState(back(state.output), back(state.lse.mT).mT, terms)
