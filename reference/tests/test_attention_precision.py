"""The float64 arithmetic against arbitrary precision."""

from collections.abc import Callable, Iterator

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from mpmath import mpf
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention

mpmath.mp.dps = 60


TERMS = ("magnitude", "score", "squares", "peak")


def exact_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, list[mpf]]:
    """One query [D] over its visible keys [S, D] and values [S, V], straight from the definition."""
    rows = [([mpf(x) for x in key], [mpf(x) for x in value]) for key, value in zip(k.tolist(), v.tolist(), strict=True)]
    query = [mpf(x) for x in q.tolist()]
    logits = [scale * mpmath.fdot(query, key) for key, _ in rows]
    sizes = [abs(scale) * mpmath.fdot([abs(x) for x in query], [abs(x) for x in key]) for key, _ in rows]
    lse = mpmath.log(mpmath.fsum(mpmath.exp(logit) for logit in logits))
    p = [mpmath.exp(logit - lse) for logit in logits]

    def columns(term: Callable[[int, mpf], mpf]) -> list[mpf]:
        return [mpmath.fsum(term(s, value[c]) for s, (_, value) in enumerate(rows)) for c in range(v.shape[1])]

    return {
        "output": columns(lambda s, x: p[s] * x),
        "magnitude": columns(lambda s, x: p[s] * abs(x)),
        "score": columns(lambda s, x: p[s] * sizes[s] * abs(x)),
        "squares": columns(lambda s, x: p[s] ** 2 * x**2),
        "peak": columns(lambda _, x: max(p) * abs(x)),
        "lse": [lse],
        "lse_score": [mpmath.fdot(p, sizes)],
    }


def golden_row(state: AttentionState, t: int, n: int) -> dict[str, list[float]]:
    assert state.terms is not None
    tnv = {"output": state.output} | {name: getattr(state.terms, name) for name in TERMS}
    nt = {"lse": state.lse, "lse_score": state.terms.lse_score}
    return {k: x[t, n].tolist() for k, x in tnv.items()} | {k: [x[n, t].item()] for k, x in nt.items()}


def rows(causal: bool) -> Iterator[tuple[int, slice]]:
    """(token, visible keys) of the batch of `test_against_arbitrary_precision`."""
    for queries, keys in (((0, 3), (0, 5)), ((3, 5), (5, 12))):
        for t in range(*queries):
            yield t, slice(keys[0], keys[1] - queries[1] + t + 1 if causal else keys[1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("scale", "digits"), [(0.31, 14), (-0.5, 14), (0.0, 14), (200.0, 11)])
def test_against_arbitrary_precision(normal: Callable[..., Tensor], causal: bool, scale: float, digits: int) -> None:
    q, k, v = normal(1, 5, 2, 4), normal(2, 12, 2, 4), normal(3, 12, 2, 3)
    state = attention(
        q, k, v, query_start_loc=(0, 3, 5), key_start_loc=(0, 5, 12), scale=scale, causal=causal, with_terms=True
    )
    for t, visible in rows(causal):
        for n in range(2):
            exact, golden = exact_row(q[t, n], k[visible, n], v[visible, n], scale), golden_row(state, t, n)
            for name in exact:
                expected = torch.tensor([float(x) for x in exact[name]], dtype=torch.float64)
                got = torch.tensor(golden[name], dtype=torch.float64)
                torch.testing.assert_close(got, expected, rtol=10.0**-digits, atol=10.0**-digits, msg=f"{name} {t} {n}")
