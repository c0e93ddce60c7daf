"""The shapes of a model at work: all its heads, hundreds of rows and keys, hundreds of requests; see ``capabilities``.

Head dims are small where size is not the point, so that a CPU judges these cases in seconds.
"""

from collections.abc import Iterator

from mla_conformance.cases.fields import Fields, each
from mla_conformance.roles.decode.lists import decode, single
from mla_conformance.roles.prefill.lists import chunk, chunked, new

_NARROW = "16-8-40-32"


def prefills() -> Iterator[Fields]:
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


def decodes() -> Iterator[Fields]:
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
