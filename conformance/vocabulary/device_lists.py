"""The cases of the capabilities that only a GPU has: graphs, streams, and operands of its size."""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Call
from mla_conformance.cases.fields import Fields
from mla_conformance.roles.prefill.lists import chunk, new

_SMALL = {"dims": "small", "heads": 1}


_CONTEXT = (2000, 64, 300, 129, 17, 1000, 40, 5)


def decode(q: tuple[int, ...], kv: tuple[int, ...], **fields: Any) -> Fields:
    """Absorbed queries against the cache, in pages that every kernel reads."""
    return {"call": Call.DECODE, "q": q, "kv": kv, "page": 64, **fields}


def cuda_graph() -> Iterator[Fields]:
    """The largest batch; the test captures a shorter one and replays it with others."""
    yield decode((1,) * 8, _CONTEXT, heads=16, data="needle")
    yield new((5, 130, 1, 64), data="needle")
    yield decode((4,) * 6, _CONTEXT[:6], heads=16)
    yield decode((1,) * 8, _CONTEXT, heads=128)
    yield decode((1,) * 8, _CONTEXT, heads=16, cache="fp8", kscale=15625)
    yield new((17,) * 8, heads=2)


def streams() -> Iterator[Fields]:
    """Shapes that a kernel splits, so that it needs memory of its own."""
    yield new((130, 65), data="needle")
    yield decode((1,) * 4, _CONTEXT[:4], heads=16, data="needle")
    yield chunk((5, 9, 3), (2000, 40, 300), data="needle")
    yield new((300,) * 4, heads=16)
    yield decode((2,) * 4, _CONTEXT[:4], heads=16)


def large_offsets() -> Iterator[Fields]:
    """Rows and blocks beyond 2^31 elements, which fit 24 GiB, and beyond 2^32, which fit 139 GiB."""
    yield decode((1,) * 3, (2000, 700, 64), heads=16, far="cache31", data="needle")
    for far in ("k31", "v31", "q31", "k32", "v32", "q32"):
        yield chunk((40,), (40,), heads=2, far=far)
    yield chunk((40,), (40,), heads=128, far="rows31")
    yield chunk((40,), (40,), heads=128, far="rows32")
    yield decode((1,) * 3, (2000, 700, 64), heads=16, far="cache32", data="needle")


def many_rows() -> Iterator[Fields]:
    """Around 2^16 rows: grids whose second and third dimension end there, 16-bit indices; beyond 2^14 requests."""
    for rows in (65535, 65536, 65537):
        yield chunk((rows,), (9,), heads=1, data="needle")
        yield chunk((rows,), (9,), **_SMALL, data="needle")
    yield new((256,) * 256 + (1,), heads=1)
    yield chunk((16,) * 4097, (3,) * 4097, **_SMALL)
    yield new((16,) * 4097, heads=1, lse=False)
    yield decode((4096,) * 16, (0,) * 16, heads=1)
    yield decode((1,) * 16500, (0,) * 16500, heads=1)
