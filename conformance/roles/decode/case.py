"""Cases of a decode backend, absorbed queries against a paged cache, and what varies in them. No torch."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases import batches, cached, case, dimensions, space


@dataclass(frozen=True, kw_only=True)
class DecodeCase(cached.CachedCase):
    role: ClassVar[Role] = Role.DECODE
    calls: ClassVar[tuple[case.Call, ...]] = (case.Call.DECODE,)
    # Rows and keys count by the head dims before absorption: results outweigh queries and keys, which heads share.
    absorbed: ClassVar[bool] = True


DECODE = space.Space(
    role=Role.DECODE,
    capability="decode_combinations",
    dimensions=(
        *dimensions.cache(*cached.CACHES),
        space.values("dims", "dims", "r1", "small", "64-64-128-256", "128-0-128-512"),
        dimensions.DTYPE,
        *batches.batch("16", *batches.DECODE_QUERIES),
        *batches.pages(),
        *dimensions.ranks(),
        *dimensions.AROUND,
        dimensions.LSE,
        *dimensions.INPUTS,
        *dimensions.storage(),
        dimensions.MAXIMA,
    ),
    rules=(
        replace(dimensions.ROOM, why="an entry of fp8_ds_mla holds 512 + 64 values of a 16-bit model"),
        batches.LONE_PADDING,
        dimensions.WITH_LSE,
        *batches.BATCH_RULES,
        *batches.PAGE_RULES,
    ),
    shape=partial(dimensions.paged_batch, case.Call.DECODE),
    small={**batches.SMALL_BATCHES, "dims": ("small",), "ranks": ("1", "2", "3", "4")},
    grids=(("queries", "cache"), ("page",)),
)
