"""What varies in the cases of a layer. No torch."""

from collections.abc import Mapping
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call
from mla_conformance.cases.combinations import DimensionValues, Row, Space
from mla_conformance.roles.layer.case import Order

_CONTEXTS: Mapping[str, tuple[int, ...]] = {
    "pages": (15, 16, 63, 64),
    "short": (0, 33, 7, 5),
    "chunks": (300, 150, 0, 700),
}
"""Context tokens of each request."""

_BATCHES: Mapping[str, Mapping[str, Any]] = {
    "decodes first": {"q": (1, 1, 9, 40), "decodes": 2, "order": Order.DECODES_FIRST},
    "prefills first": {"q": (40, 9, 1, 1), "decodes": 2, "order": Order.PREFILLS_FIRST},
    "prefills": {"q": (5, 70, 1, 20), "decodes": 0},
    "decodes": {"q": (1, 1, 1, 1), "decodes": 4},
    "several tokens": {"q": (3, 3, 20, 9), "decodes": 2, "order": Order.DECODES_FIRST},
    "uneven tokens": {"q": (20, 9, 2, 5), "decodes": 2, "order": Order.PREFILLS_FIRST},
}
"""New tokens of each request, and which of them decode."""

_PAGING = ((64, 256), (16, 64), (1, 96), (32, 1024), (128, 512))

_FIELDS: Mapping[str, DimensionValues] = {
    "batch": {name: {} for name in _BATCHES},
    "contexts": {name: {} for name in _CONTEXTS},
    "paging": {f"{page}/{room}": {"page": page, "workspace": room} for page, room in _PAGING},
    "heads": {str(heads): {"heads": heads} for heads in (16, 4, 1, 5)},
    "data": {name: {"data": name} for name in ("needle", "normal", "hot_tail", "large_logits")},
    "cache": {name: {"cache": name} for name in ("auto", "fp8", "fp8_ds_mla")},
    "dims": {name: {"dims": name} for name in ("r1", "glm", "32-16-32-64")},
    "dtype": {name: {"dtype": name} for name in ("bf16", "fp16", "fp32")},
    "excluded": {"none": {"pad": 0}} | {name: {"pad": 3, "poison": name} for name in ("nan", "inf", "large")},
    "tails": {name: {"tails": name} for name in ("stale", "null", "minus", "huge")},
    "layers": {"1": {"layers": 1}, "3": {"layers": 3}},
    "scale": {str(scale): {"scale": scale} for scale in (159, 50)},
}


def _shape(row: Row) -> Mapping[str, Any]:
    return {"call": Call.LAYER, "kv": _CONTEXTS[row["contexts"]], **_BATCHES[row["batch"]]}


def _possible(row: Row) -> bool:
    """An ``fp8_ds_mla`` entry has one latent dim and 16-bit rope values; padding is for batches that decode."""
    if row.get("cache") == "fp8_ds_mla" and (row.get("dims") == "32-16-32-64" or row.get("dtype") == "fp32"):
        return False
    return row.get("batch") != "prefills" or row.get("excluded", "none") == "none"


LAYER = Space(
    role=Role.LAYER,
    capability="layer_combinations",
    counted=("mixed_batch", "graph_padding"),
    fields=_FIELDS,
    shaped=("batch", "contexts"),
    shape=_shape,
    possible=_possible,
    # A layer over kernels that read one page size and no codes.
    parts=(
        {"paging": ("64/256",), "cache": ("auto",), "dims": ("r1", "glm"), "dtype": ("bf16", "fp16")},
        {},
    ),
)
