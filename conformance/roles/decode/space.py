"""What varies in the cases of a decode backend. No torch."""

from mla_conformance.backends.roles import Role
from mla_conformance.cases.batches import (
    BATCH_RULES,
    DECODE_QUERIES,
    LONE_PADDING,
    PAGE_RULES,
    SMALL_BATCHES,
    batch,
    batch_fields,
    pages,
    shapes_of,
)
from mla_conformance.cases.cached import CACHES
from mla_conformance.cases.case import Call
from mla_conformance.cases.dimensions import (
    LAYOUT,
    LSE,
    MAXIMA,
    PADDING,
    POISONS,
    SCALE,
    SEVERAL_RANKS,
    cache,
    data,
    ranks,
    room,
    spare_blocks,
    storage,
)
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import Pick, Row, Rule, Space, never, values


def _fields(row: Row, pick: Pick) -> Fields:
    fields = batch_fields(row, pick(tuple(shapes_of(row))))
    return {"call": Call.DECODE, **fields, **spare_blocks(row, fields["page"])}


DECODE = Space(
    role=Role.DECODE,
    capability="decode_combinations",
    dimensions=(
        *cache(*CACHES),
        values("dims", "dims", "r1", "small", "64-64-128-256", "128-0-128-512"),
        values("dtype", "dtype", "bf16", "fp16", "fp32"),
        *batch("16", *DECODE_QUERIES),
        *pages(),
        *ranks(),
        PADDING,
        POISONS,
        LSE,
        data("needle", "normal"),
        LAYOUT,
        SCALE,
        *storage(),
        MAXIMA,
    ),
    rules=(
        Rule("an entry of fp8_ds_mla holds 512 + 64 values of a 16-bit model", ("cache", "dims", "dtype"), room),
        LONE_PADDING,
        never("ranks are merged by their LSE", {"ranks": SEVERAL_RANKS, "lse": ("not asked",)}),
        *BATCH_RULES,
        *PAGE_RULES,
    ),
    shape=_fields,
    small=SMALL_BATCHES,
)
