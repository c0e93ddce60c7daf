"""What varies in the cases of a decode backend. No torch."""

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.combinations import DimensionValues, Row, Space

_LENGTHS: Mapping[str, tuple[int, ...]] = {
    "ragged": (64, 5, 1000, 17),
    "edges": (63, 127, 62, 128, 255),
    "long": (2100, 3),
    "many": (16,) * 4 + (3,) * 6,
    "one": (300,),
}
"""Context tokens of each request."""

_QUERIES: Mapping[str, tuple[int, ...]] = {"1": (1,), "2": (2,), "4": (4,), "uneven": (3, 1, 2)}
"""Query tokens of the requests, over and over."""

_RANKS = ((2, 1), (4, 64), (8, 1))
"""Ranks and interleave."""

_FIELDS: Mapping[str, DimensionValues] = {
    "heads": {str(heads): {"heads": heads} for heads in (16, 128, 32, 64, 96, 20, 1)},
    "lengths": {name: {} for name in _LENGTHS},
    "page": {str(page): {"page": page} for page in (64, 16, 32, 128, 1)},
    "layout": {layout.value: {"layout": layout.value} for layout in Layout},
    "data": {name: {"data": name} for name in ("needle", "normal", "hot_tail", "large_logits", "outliers")},
    "queries": {name: {} for name in _QUERIES},
    "ranks": {"1": {"ranks": 1}} | {f"{n}/{s}": {"ranks": n, "interleave": s} for n, s in _RANKS},
    "excluded": {"none": {"pad": 0}} | {name: {"pad": 3, "poison": name} for name in ("nan", "inf", "large")},
    "tails": {name: {"tails": name} for name in ("stale", "null", "minus", "huge")},
    "cache": {name: {"cache": name} for name in ("auto", "fp8", "fp8_ds_mla")},
    "dims": {name: {"dims": name} for name in ("r1", "small", "64-64-128-256")},
    "dtype": {name: {"dtype": name} for name in ("bf16", "fp16", "fp32")},
    "scale": {str(scale): {"scale": scale} for scale in (159, 50, 237)},
    "layers": {"1": {"layers": 1}, "2": {"layers": 2}},
    "lse": {"asked": {"lse": True}, "not asked": {"lse": False}},
    "maxima": {"true": {"inflate": 1}, "loose": {"inflate": 100}},
}


def _shape(row: Row) -> Mapping[str, Any]:
    context = _LENGTHS[row["lengths"]]
    return {"call": Call.DECODE, "q": tuple(islice(cycle(_QUERIES[row["queries"]]), len(context))), "kv": context}


def _possible(row: Row) -> bool:
    """An ``fp8_ds_mla`` entry has one shape; rows of padding have one query token each, so others have one too."""
    if row.get("cache") == "fp8_ds_mla" and (row.get("dims", "r1") != "r1" or row.get("dtype") == "fp32"):
        return False
    if row.get("lengths") == "one" and row.get("queries") == "uneven":
        return False
    return row.get("excluded", "none") == "none" or row.get("queries", "1") == "1"


DECODE = Space(
    role=Role.DECODE,
    capability="decode_combinations",
    counted=(
        "decode",
        "decode_lse",
        "decode_multi_token",
        "paged_cache",
        "kv_cache_fp8",
        "kv_cache_fp8_ds_mla",
        "dcp",
    ),
    fields=_FIELDS,
    shaped=("lengths", "queries"),
    shape=_shape,
    possible=_possible,
    # FlashMLA and kernels like it take no more.
    parts=({"page": ("64",), "cache": ("auto",), "dims": ("r1",), "dtype": ("bf16", "fp16")}, {}),
)
