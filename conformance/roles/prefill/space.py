"""What varies in the cases of a prefill backend. No torch."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, CaseError, Layout
from mla_conformance.cases.combinations import DimensionValues, Row, Space

_ENTRIES = (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT)

_LENGTHS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((1,), (257,)),
    "tiles": ((64, 65), (128, 129)),
    "ragged": ((5, 9, 3, 33), (64, 0, 300, 17)),
    "many": ((3,) * 12, tuple(range(5, 17))),
    "empty": ((3, 0, 5), (0, 40, 17)),
}
"""New tokens and context tokens of each request."""

_FIELDS: Mapping[str, DimensionValues] = {
    "call": {call.value: {"call": call.value} for call in _ENTRIES},
    "data": {name: {"data": name} for name in ("normal", "needle", "hot_tail", "large_logits", "outliers", "rising")},
    "lengths": {name: {} for name in _LENGTHS},
    "dims": {name: {"dims": name} for name in ("r1", "glm", "small", "128-0-128-512", "16-8-40-32")},
    "layout": {layout.value: {"layout": layout.value} for layout in Layout},
    "dtype": {name: {"dtype": name} for name in ("bf16", "fp16", "fp32")},
    "heads": {str(heads): {"heads": heads} for heads in (1, 4, 16)},
    "scale": {str(scale): {"scale": scale} for scale in (50, 159, 237)},
    "cache": {f"{page}/{room}": {"page": page, "workspace": room} for page, room in ((16, 256), (1, 96), (64, 320))},
    "excluded": {"none": {"pad": 0}} | {name: {"pad": 3, "poison": name} for name in ("nan", "inf", "large")},
    "lse": {"asked": {"lse": True}, "not asked": {"lse": False}},
    "out": {"given": {"out": True}, "made": {"out": False}},
    "maxima": {"true": {"inflate": 1}, "loose": {"inflate": 100}},
}


def _shape(row: Row) -> Mapping[str, Any]:
    new, context = _LENGTHS[row["lengths"]]
    return {"q": new, "kv": () if row["call"] == Call.NEW_TOKENS else context}


def _possible(row: Row) -> bool:
    call = row.get("call")
    if call is None:
        return True
    if call != Call.CHUNKED_CONTEXT and row.get("cache", "16/256") != "16/256":
        return False
    if call != Call.NEW_TOKENS and row.get("lse") == "not asked":
        return False
    if call == Call.CONTEXT_CHUNK and row.get("out") == "given":
        return False
    return not {"lengths", "cache"} <= set(row) or _planned(call, row["lengths"], row["cache"])


@cache
def _planned(call: str, lengths: str, paging: str) -> bool:
    """Whether the workspace holds a page of each request."""
    try:
        PREFILL.case_of({"call": call, "lengths": lengths, "cache": paging})
    except CaseError:
        return False
    return True


PREFILL = Space(
    role=Role.PREFILL,
    capability="combinations",
    counted=_ENTRIES,
    fields=_FIELDS,
    shaped=("lengths",),
    shape=_shape,
    possible=_possible,
    # Many kernels for GPUs take no more than the second; the whole comes first since its ids are older.
    parts=({}, {"dtype": ("bf16",), "dims": ("r1",)}),
)
