"""What varies in the cases of a sparse backend. No torch."""

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.combinations import DimensionValues, Row, Space

_LENGTHS: Mapping[str, tuple[int, ...]] = {
    "ragged": (64, 5, 400, 17),
    "edges": (63, 127, 62, 128),
    "long": (2100, 3),
    "one": (300,),
}
"""Context tokens of each request."""

_QUERIES: Mapping[str, tuple[int, ...]] = {"1": (1,), "2": (2,), "uneven": (3, 1, 2)}
"""Query tokens of the requests, over and over."""

_RANKS = ((2, 1), (4, 16))
"""Ranks and interleave."""

_FIELDS: Mapping[str, DimensionValues] = {
    "call": {call.value: {"call": call.value} for call in (Call.SPARSE_DECODE, Call.SPARSE_PREFILL)},
    "heads": {str(heads): {"heads": heads} for heads in (64, 16, 128, 32)},
    "topk": {str(topk): {"topk": topk} for topk in (64, 128, 100, 512, 2048, 63)},
    "lengths": {name: {} for name in _LENGTHS},
    "queries": {name: {} for name in _QUERIES},
    "fill": {name: {"fill": name} for name in ("ragged", "full")},
    "holes": {name: {"holes": name} for name in ("end", "front", "scattered")},
    "length": {"none": {"length": False, "behind": "minus"}}
    | {behind: {"length": True, "behind": behind} for behind in ("huge", "stale", "zero")},
    "data": {name: {"data": name} for name in ("needle", "normal", "hot_tail", "large_logits")},
    "page": {str(page): {"page": page} for page in (64, 16, 1)},
    "cache": {name: {"cache": name} for name in ("auto", "fp8_ds_mla", "fp8_v4", "fp8_v41", "fp8")},
    "dims": {name: {"dims": name} for name in ("r1", "128-0-128-512")},
    "dtype": {name: {"dtype": name} for name in ("bf16", "fp16")},
    "space": {name: {"space": name} for name in ("slot", "position", "rank_local")},
    "ranks": {"1": {"ranks": 1, "interleave": 1}} | {f"{n}/{s}": {"ranks": n, "interleave": s} for n, s in _RANKS},
    "sink": {name: {"sink": name} for name in ("none", "drawn", "extreme")},
    "extra": {name: {"extra": name} for name in ("none", "auto", "fp8_v4", "fp4_v41")},
    "unselected": {"drawn": {"unselected": "drawn"}}
    | {name: {"unselected": "poison", "poison": name} for name in ("nan", "inf")},
    "layout": {layout.value: {"layout": layout.value} for layout in (Layout.PACKED, Layout.SLICED, Layout.ODD)},
    "lse": {"asked": {"lse": True}, "not asked": {"lse": False}},
}

_PLAIN = {"cache": "auto", "extra": "none", "ranks": "1", "page": "64"}
"""What gathered keys leave of the dimensions of a cache."""


def _shape(row: Row) -> Mapping[str, Any]:
    context = _LENGTHS[row["lengths"]]
    return {"q": tuple(islice(cycle(_QUERIES[row["queries"]]), len(context))), "kv": context}


def _possible(row: Row) -> bool:
    """Gathered keys are plain and on one rank; V4's entries have no rope beside them; ranks share no sink."""
    plain = all(row.get(name, value) == value for name, value in _PLAIN.items())
    if row.get("call") == Call.SPARSE_PREFILL and (not plain or row.get("space") == "rank_local"):
        return False
    v4 = {row.get("cache"), row.get("extra")} & {"fp8_v4", "fp8_v41", "fp4_v41"}
    if v4 and row.get("dims", "128-0-128-512") != "128-0-128-512":
        return False
    if row.get("ranks", "1") != "1" and not all(
        row.get(name, wanted) == wanted for name, wanted in (("sink", "none"), ("extra", "none"), ("lse", "asked"))
    ):
        return False
    return row.get("lengths") != "one" or row.get("queries") != "uneven"


SPARSE = Space(
    role=Role.SPARSE,
    capability="sparse_combinations",
    counted=(
        "sparse_decode",
        "sparse_prefill",
        "sparse_lse",
        "selection_length",
        "index_spaces",
        "unselected_keys",
        "attention_sinks",
        "second_cache",
        "sparse_fp8",
        "sparse_fp8_ds_mla",
        "sparse_fp8_v4",
        "sparse_fp8_v41",
        "sparse_fp4_v41",
        "sparse_dcp",
    ),
    fields=_FIELDS,
    shaped=("lengths", "queries"),
    shape=_shape,
    possible=_possible,
    # FlashMLA and kernels like it take no more.
    parts=(
        {
            "heads": ("64", "128"),
            "topk": ("64", "128", "512", "2048"),
            "page": ("64",),
            "dtype": ("bf16",),
            "space": ("slot",),
        },
        {},
    ),
)
