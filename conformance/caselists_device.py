"""The cases of the capabilities that only a GPU has: graphs, streams, and operands of its size."""

from collections.abc import Iterator

from mla_conformance.caselists import Fields, chunk, new

_SMALL = {"dims": "small", "heads": 1}


def cuda_graph() -> Iterator[Fields]:
    """The batch that is captured; the test replays it with others."""
    yield new((5, 130, 1, 64), data="needle")
    yield new((17,) * 8, heads=2)


def streams() -> Iterator[Fields]:
    """Shapes that a kernel splits, so that it needs memory of its own."""
    yield new((130, 65), data="needle")
    yield chunk((5, 9, 3), (2000, 40, 300), data="needle")
    yield new((300,) * 4, heads=16)


def large_offsets() -> Iterator[Fields]:
    """Rows beyond 2^31 elements, which fit 24 GiB, and beyond 2^32, which fit 139 GiB."""
    for far in ("k31", "v31", "q31", "k32", "v32", "q32"):
        yield chunk((40,), (40,), heads=2, far=far)
    yield chunk((40,), (40,), heads=128, far="rows31")
    yield chunk((40,), (40,), heads=128, far="rows32")


def many_rows() -> Iterator[Fields]:
    """Around 2^16 rows: grids whose second and third dimension end there, 16-bit indices."""
    for rows in (65535, 65536, 65537):
        yield chunk((rows,), (9,), heads=1, data="needle")
        yield chunk((rows,), (9,), **_SMALL, data="needle")
    yield new((256,) * 256 + (1,), heads=1)
    yield chunk((16,) * 4097, (3,) * 4097, **_SMALL)
    yield new((16,) * 4097, heads=1, lse=False)
