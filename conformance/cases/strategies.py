"""Cases as hypothesis draws them: small numbers and names, never tensors, the simplest first, so that they shrink."""

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, reject, settings
from hypothesis import strategies as st

from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.cases.drawn import DrawnOption, DrawnOptions

_EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513)
_LENGTHS = st.integers(1, 40) | st.integers(0, 600) | st.sampled_from(_EDGES)
_SOME_TOKENS = st.integers(1, 40) | st.sampled_from(_EDGES)
_HEADS = st.integers(1, 20)
_MOST_REQUESTS = 5
_MOST_DECODE_TOKENS = 8
_SHORTEST_CHUNK = 32


def profile(draws: int) -> settings:
    """The same ``draws`` cases in every run, and nothing but them: every field is given, so no setting leaks in.

    Cases that are rejected do not count; after ten times as many hypothesis gives up.
    """
    return settings(
        max_examples=draws,
        derandomize=True,
        database=None,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        stateful_step_count=1,
        report_multiple_bugs=False,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )


@st.composite
def cases(draw: st.DrawFn, spaces: Mapping[str, Mapping[Call, DrawnOptions]]) -> Case:
    """A case of one of some capabilities, by one of its calls, with one of each of the call's options."""
    capability = draw(st.sampled_from(list(spaces)))
    call, options = draw(st.sampled_from(list(spaces[capability].items())))
    fields = {name: value for values in options.values() for name, value in draw(st.sampled_from(values)).items()}
    lengths = _FORMS[call](draw, fields)
    heads = {} if "heads" in fields else {"heads": draw(_HEADS)}
    try:
        return Case.of(**{**fields, **lengths, **heads, "capability": capability, "call": call})
    except CaseError:  # a layout of the cache that these head dims or this dtype do not fit
        reject()


def _new_tokens(draw: st.DrawFn, fields: DrawnOption) -> dict[str, Any]:
    return {"q": tuple(draw(st.lists(_LENGTHS, min_size=1, max_size=_MOST_REQUESTS)))}


def _context_chunk(draw: st.DrawFn, fields: DrawnOption) -> dict[str, Any]:
    return _with_context(draw, _new_tokens(draw, fields)["q"])


def _chunked_context(draw: st.DrawFn, fields: DrawnOption) -> dict[str, Any]:
    lengths = _context_chunk(draw, fields)
    return {**lengths, "workspace": _workspace(draw, len(lengths["q"]), fields["page"])}


def _decode(draw: st.DrawFn, fields: DrawnOption) -> dict[str, Any]:
    return _with_context(draw, _decode_tokens(draw, fields["q"], 1))


def _layer(draw: st.DrawFn, fields: DrawnOption) -> dict[str, Any]:
    """Prefills are longer than decodes, by which a builder that is told of neither knows them."""
    decodes = _decode_tokens(draw, fields["q"], 0)
    longest = max(decodes, default=1)
    prefills = draw(st.lists(_SOME_TOKENS, min_size=0 if decodes else 1, max_size=_MOST_REQUESTS - len(decodes)))
    later = tuple(longest + tokens for tokens in prefills)
    q = decodes + later if fields["order"] == "decodes_first" else later + decodes
    workspace = _workspace(draw, len(q), fields["page"])
    return {**_with_context(draw, q), "decodes": len(decodes), "workspace": workspace}


def _with_context(draw: st.DrawFn, q: tuple[int, ...]) -> dict[str, Any]:
    return {"q": q, "kv": tuple(draw(st.lists(_LENGTHS, min_size=len(q), max_size=len(q))))}


def _decode_tokens(draw: st.DrawFn, like: tuple[int, ...], fewest: int) -> tuple[int, ...]:
    """Query tokens of each request: one, as many each, or not, as ``like`` has them."""
    requests = draw(st.integers(fewest, _MOST_REQUESTS))
    tokens = st.integers(1, _MOST_DECODE_TOKENS) if max(like) > 1 else st.just(1)
    if len(set(like)) == 1:
        return (draw(tokens),) * requests
    return tuple(draw(st.lists(tokens, min_size=requests, max_size=requests)))


def _workspace(draw: st.DrawFn, requests: int, page: int) -> int:
    """A workspace that holds at least one page and :data:`_SHORTEST_CHUNK` tokens of every request."""
    return requests * max(page, _SHORTEST_CHUNK) * draw(st.integers(1, 6))


_FORMS: Mapping[Call, Callable[[st.DrawFn, DrawnOption], dict[str, Any]]] = {
    Call.NEW_TOKENS: _new_tokens,
    Call.CONTEXT_CHUNK: _context_chunk,
    Call.CHUNKED_CONTEXT: _chunked_context,
    Call.DECODE: _decode,
    Call.LAYER: _layer,
    Call.SPARSE_DECODE: _decode,
    Call.SPARSE_PREFILL: _decode,
}
"""The lengths of a case, by the call that it drives."""
