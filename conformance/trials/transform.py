"""Problems made from problems: the same inputs regrouped, scaled or rewritten in place, for laws of two runs.

What is drawn for another batch is drawn by the id of its case, so that a line that runs the case again has the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Case
from mla_conformance.cases.grammar import Data
from mla_conformance.problems.calls import AttentionCall, KernelCall, Problem
from mla_conformance.problems.ranks import CallOnRanks
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.roles.sparse.problem import SparseCall


def regroup(problem: Problem, requests: Sequence[int], queries: int | None = None) -> Problem:
    """The given requests in the given order, each cut to its first ``queries`` new tokens.

    A problem of one call only; for new tokens the keys are cut with the queries, other calls are not cut.
    """
    regrouped = problem.calls[0].regrouped(problem.case, requests, queries)
    return replace(problem, key=f"{problem.key}|requests={list(requests)}|queries={queries}", calls=(regrouped,))


def scale_values(problem: Problem, factor: float) -> Problem:
    """All values times a power of two, which is exact."""
    calls = tuple(replace(call, v=call.v * factor) for call in problem.attention)
    return replace(problem, key=f"{problem.key}|values={factor}", calls=calls)


def scale_cache(problem: Problem, factor: float) -> Problem:
    """The same decode with ``k_scale`` times a power of two, which only the keys of an fp8 cache know: exactly."""
    assert isinstance(problem.case, CachedCase)
    meant = factor if problem.case.cache == "fp8" else 1.0
    calls = tuple(_rescaled(call, factor, meant) for call in problem.calls)
    whole = problem.whole and replace(problem.whole, k=problem.whole.k * meant, v=problem.whole.v * meant)
    return replace(problem, key=f"{problem.key}|k_scale={factor}", calls=calls, whole=whole)


def _rescaled(call: KernelCall, factor: float, meant: float) -> AttentionCall:
    assert isinstance(call, DecodeCall | SparseCall)
    rescaled = call.given_otherwise(k_scale=call.k_scale * factor)
    return replace(rescaled, k=call.k * meant, v=call.v * meant)


def overwrite(problem: Problem, other: Problem) -> Problem:
    """The tensors of ``problem`` with the values of ``other``, of the same shapes: same addresses, other contents."""
    calls = tuple(mine.overwritten(theirs) for mine, theirs in zip(problem.calls, other.calls, strict=True))
    return replace(problem, key=other.key, calls=calls, whole=other.whole)


def other_contents(case: Case) -> Case:
    """The same batch in the same blocks, of which queries, keys and values are others."""
    data = Data.OUTLIERS if case.data == Data.INTEGERS else Data.INTEGERS
    if isinstance(case, LayerCase):
        return replace(case, data=data, latents=data)
    return replace(case, data=data)


def over_metadata(problem: Problem, owner: Problem) -> Problem:
    """``problem`` with the metadata objects of ``owner``, whose batch stands in the same blocks.

    A layer's call holds none.
    """
    return replace(problem, calls=tuple(map(_over, problem.calls, owner.calls)))


def _over(call: Any, owner: Any) -> Any:
    """On several ranks each call has metadata of its own."""
    if isinstance(call, CallOnRanks):
        return call.of(tuple(map(_over, call.parts, owner.parts)))
    return replace(call, metadata=owner.metadata)


def of_size(case: Case, requests: int) -> Case:
    """So many requests as long as those of the case, in an order drawn anew, with other values."""
    known = range(len(case.q))
    rows = Random(f"{case.id}|{requests}").sample([*known] * -(-requests // len(known)), requests)
    q, kv = (tuple(lengths[row] for row in rows if lengths) for lengths in (case.q, case.kv))
    return replace(case, q=q, kv=kv, seed=case.seed + 100 + requests)


def shortened(case: Case, number: int) -> Case:
    """The same number of requests, shorter by chance, with other values; another batch for each ``number``."""
    draw, seed = Random(f"{case.id}|{number}"), case.seed + 100 * number
    if case.kv:
        return replace(case, kv=tuple(draw.randint(0, length) for length in case.kv), seed=seed)
    return replace(case, q=tuple(draw.randint(min(1, length), length) for length in case.q), seed=seed)
