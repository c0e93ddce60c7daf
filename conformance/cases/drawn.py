"""What exploration draws: of which capabilities, and what varies in their cases beside lengths and heads. No torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from mla_conformance.cases.case import Call, Case, Layout
from mla_conformance.cases.grammar import Data
from mla_conformance.reference.chunking import PLANNERS

DrawnOption = Mapping[str, Any]
"""Fields of a case."""
DrawnOptions = Mapping[str, Sequence[DrawnOption]]
"""By the name of what varies, the fields that stand for each of its values, the simplest first."""

_PREFILLS = (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT)

DRAWN: Mapping[str, Sequence[Call]] = {
    **{call.value: (call,) for call in _PREFILLS},
    "decode": (Call.DECODE,),
    "sparse_decode": (Call.SPARSE_DECODE,),
    "sparse_prefill": (Call.SPARSE_PREFILL,),
    "mixed_batch": (Call.LAYER,),
    "cache_write": (Call.LAYER,),
    "call_order": (*_PREFILLS, Call.DECODE),
    "no_side_effects": (*_PREFILLS, Call.DECODE),
}
"""Capabilities that cases are drawn of, each with the calls that these may drive."""


def _each(name: str, *values: Any) -> tuple[DrawnOption, ...]:
    return tuple({name: value} for value in values)


_ANY: DrawnOptions = {
    "scale": _each("scale", 159, 100, 37, 400),
    "data": _each("data", *Data),
    "excluded": ({}, {"pad": 3}, {"pad": 1, "poison": "inf"}, {"pad": 2, "poison": "large"}),
}
_KERNEL: DrawnOptions = {
    **_ANY,
    "dims": _each("dims", "small", "r1", "glm", "64-64-128-256", "128-0-128-512", "16-8-40-32"),
    "layout": _each("layout", *Layout),
    "maxima": _each("inflate", 1, 100),
}
_PREFILL: DrawnOptions = {**_KERNEL, "dtype": _each("dtype", "bf16", "fp16", "fp32", "e4m3")}
_GIVEN: Sequence[DrawnOption] = ({}, {"out": True})
_CODES = tuple({"quant": "fp8", "lse": False, "oscale": scale} for scale in (13000, 300, 1_000_000))
_CACHE: DrawnOptions = {
    "dtype": _each("dtype", "bf16", "fp16", "fp32"),
    "page": _each("page", 16, 64, 32, 128, 1),
    "cache": _each("cache", "auto", "fp8", "fp8_ds_mla"),
    "kscale": _each("kscale", 13_000, 777, 2_300_000),
    "tails": _each("tails", "stale", "null", "minus", "huge"),
    "layers": _each("layers", 1, 3),
    "spare": _each("spare", 3, 200),
}
_LISTS: DrawnOptions = {
    "heads": _each("heads", 64, 128, 16, 5),
    "topk": _each("topk", 64, 128, 100, 512),
    "fill": _each("fill", "full", "ragged"),
    "holes": _each("holes", "end", "front", "scattered"),
    "order": _each("order", "drawn", "ascending", "descending"),
    "length": ({}, *({"length": True, "behind": behind} for behind in ("minus", "huge", "stale", "zero"))),
    "repeats": _each("repeats", False, True),
    "unselected": _each("unselected", "drawn", "poison"),
    "sink": _each("sink", "none", "drawn", "extreme"),
    "result": ({}, {"lse": False}),
    "queries": _each("q", (1, 1), (2, 2), (3, 1)),
}

OPTIONS: Mapping[Call, DrawnOptions] = {
    Call.NEW_TOKENS: {**_PREFILL, "result": (*_GIVEN, {"lse": False}, {"lse": False, "out": True}, *_CODES)},
    Call.CONTEXT_CHUNK: _PREFILL,
    Call.CHUNKED_CONTEXT: {
        **_PREFILL,
        "page": _CACHE["page"],
        "planner": _each("planner", *PLANNERS),
        "merge": _each("merge", "golden", "own"),
        "result": _GIVEN,
    },
    Call.DECODE: {
        **_KERNEL,
        **_CACHE,
        "queries": _each("q", (1, 1), (2, 2), (3, 1)),
        "ranks": ({}, {"ranks": 2}, {"ranks": 3, "interleave": 16}, {"ranks": 4, "interleave": 64}),
    },
    Call.SPARSE_DECODE: {
        **_KERNEL,
        **_CACHE,
        **_LISTS,
        "cache": _each("cache", "auto", "fp8", "fp8_ds_mla", "fp8_v4", "fp8_v41"),
        "space": _each("space", "slot", "position", "rank_local"),
        "extra": _each("extra", "none", "auto", "fp8_v4", "fp4_v41"),
        "ranks": ({}, {"ranks": 2}, {"ranks": 3, "interleave": 16}),
    },
    Call.SPARSE_PREFILL: {
        **_KERNEL,
        **_LISTS,
        "dtype": _CACHE["dtype"],
        "space": _each("space", "slot", "position"),
        "spare": _CACHE["spare"],
    },
    Call.LAYER: {
        **_ANY,
        **_CACHE,
        "dims": _each("dims", "32-16-32-64", "r1", "glm", "16-8-40-64"),
        "order": _each("order", "prefills_first", "decodes_first"),
        "queries": _each("q", (1, 1), (2, 2), (3, 1)),
    },
}
"""What varies, by the call that is driven. ``q`` says how many query tokens decodes have: one, as many each, or not."""

_CONFIGURATION = ("dims", "dtype", "page", "cache")
"""What backends declare combinations of; each that is declared is one option."""


def options_of(capability: str, options: DrawnOptions) -> DrawnOptions:
    """Those of a call's options that a capability has cases of: instances side by side have one metadata each."""
    return {**options, "ranks": options["ranks"][:1]} if capability == "call_order" and "ranks" in options else options


def plain_case(capability: str, call: Call, fields: DrawnOption) -> Case:
    """A small case with these fields, by which a backend can say what it supports.

    Raises:
        CaseError: no case has them together.
    """
    q, given = (1, 1), dict(fields)
    if call is Call.LAYER:
        decodes = given.get("q", q)
        q = (*decodes, 9) if given.get("order") == "decodes_first" else (9, *decodes)
        given |= {"q": q, "decodes": len(decodes)}
    context = {} if call is Call.NEW_TOKENS else {"kv": (5,) * len(q)}
    return Case.of(**{"q": q, **context, **given, "capability": capability, "call": call})


def declared_options(options: DrawnOptions, declares: Callable[[DrawnOption], bool]) -> DrawnOptions:
    """The configurations that a backend declares, and what it declares beside the first of them; empty without one.

    Args:
        options: all of them.
        declares: whether the backend declares a case with these fields.
    """
    usual = _joined(values[0] for values in options.values())
    parts = [options[name] for name in _CONFIGURATION if name in options]
    found = [configuration for configuration in map(_joined, product(*parts)) if declares({**usual, **configuration})]
    if not found:
        return {}
    beside = {**usual, **found[0]}
    further = {name: values for name, values in options.items() if name not in _CONFIGURATION}
    return {
        "configuration": found,
        **{name: [option for option in values if declares({**beside, **option})] for name, values in further.items()},
    }


def _joined(options: Iterable[DrawnOption]) -> dict[str, Any]:
    return {name: value for option in options for name, value in option.items()}
