"""Cases of several roles: the shapes of a model at work, what only a GPU has, and the nightly tier's long contexts.

Head dims are small where size is not the point, so that a CPU judges the shapes of a model in seconds. No torch.
"""

from collections.abc import Iterator
from functools import partial

from mla_conformance.cases.case import Call
from mla_conformance.cases.grammar import Fields, each
from mla_conformance.roles.decode.case import decode, single
from mla_conformance.roles.prefill.case import PrefillCase, chunk, chunked, new

_NARROW = "16-8-40-32"


def model_prefills() -> Iterator[Fields]:
    """16 to 128 heads, at least 600 keys and 300 rows; contexts of many requests and of many chunks."""
    yield new((330, 290), heads=32, dims="small", data="needle")
    yield chunk((310, 1), (650, 900), heads=128, dims="small", data="needle")
    yield chunked((150, 170), (700, 333), heads=64, dims="small", page=64, workspace=512, data="needle")
    yield new((610,), heads=16, lse=False)
    yield new((290, 320), heads=128, dims="small", data="hot_tail")
    yield chunk((300, 64), (600, 40), heads=16)
    yield new((400, 250), heads=64, dims=_NARROW, dtype="fp16", data="needle", lse=False)
    yield chunked((5, 2), (1100, 40), dims="small", page=16, workspace=32, data="needle")
    yield chunked((3,) * 40, (16, 40, 3, 0, 65) * 8, dims="small", workspace=1024, data="needle")
    yield chunked((300, 30), (900, 20), heads=32, dims="small", workspace=1024, planner="greedy")


def model_decodes() -> Iterator[Fields]:
    """32 to 128 heads over long sequences, hundreds of requests, several tokens of each, eight ranks."""
    yield single(700, 2000, 64, 129, heads=128, data="needle")
    yield single(4096, 5, heads=64, data="hot_tail")
    yield single(*(17, 63, 64, 130) * 75, heads=32, dims="small", data="needle")
    yield decode((4,) * 6, (700, 64, 255, 5, 1000, 128), heads=96, data="needle")
    yield decode((8, 8), (1500, 300), heads=32, data="hot_tail")
    yield single(*(17,) * 320, heads=128, dims="small")
    yield single(9000, 5000, heads=32, dims="small", data="needle")
    yield single(*(5, 30, 64) * 100, heads=1, data="needle")
    yield decode((2,) * 260, (31, 64) * 130, heads=16, dims="small", data="needle")
    yield from each(
        [
            single(2000, 300, 5, heads=64, data="needle"),
            single(*(17, 63, 64, 130) * 20, heads=16, dims="small", data="needle"),
            decode((4, 4), (1000, 128), heads=32, interleave=64, data="needle"),
        ],
        ranks=8,
    )


_SMALL = {"dims": "small", "heads": 1}


_CONTEXT = (2000, 64, 300, 129, 17, 1000, 40, 5)


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


_MILLION = 2**20

_chunked = partial(PrefillCase, capability=Call.CHUNKED_CONTEXT, heads=16, page=64, workspace=65536)

LONG_CONTEXTS = (
    PrefillCase(capability=Call.NEW_TOKENS, heads=16, q=(32768,), data="needle"),
    PrefillCase(capability=Call.NEW_TOKENS, heads=128, q=(8192,), data="needle"),
    PrefillCase(capability=Call.NEW_TOKENS, heads=16, q=(98304, 1, 32768), data="hot_tail"),
    PrefillCase(capability=Call.CONTEXT_CHUNK, heads=128, q=(256,), kv=(131072,), data="needle"),
    PrefillCase(capability=Call.CONTEXT_CHUNK, heads=16, q=(512,), kv=(_MILLION,), data="needle"),
    _chunked(q=(512,), kv=(_MILLION,), data="needle"),
    _chunked(q=(512, 3), kv=(_MILLION - 1, 100)),
)
