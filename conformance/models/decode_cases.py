"""What an engine calls of a dense decode, over pages as kernels have them. No torch."""

from mla_conformance.cases.decode_caselists import decode, single
from mla_conformance.models.listed import Listed, deciding


def decodes(layout: str) -> Listed:
    """One query token a request, and several."""
    yield from _single("decode" if layout == "auto" else f"kv_cache_{layout}")
    yield from _lse()
    yield from _multi_token()
    yield from _pages()
    yield "cuda_graph", single(1000, 17, 64, 300, 5, 129, 40, 9, data="needle")


def _single(capability: str) -> Listed:
    return deciding(
        capability,
        single(64, 5, 1000, 17, data="needle"),
        single(3999, 0, data="hot_tail"),
        single(0, 14, 15, 16, 30, 31, 62, 63, 126, 127, 254, 255, 511, data="needle"),
        single(12_000, data="needle"),
        single(*(17, 63, 64, 130) * 16, data="needle"),
        single(130, 40),
        single(300, 40, data="large_logits"),
        single(300, 40, data="outliers"),
        single(300, 40, data="low_rank"),
        single(300, 40, data="tiny_values"),
        single(1000, 129, data="hot_ones"),
        lse=False,
    )


def _lse() -> Listed:
    yield "decode_lse", single(64)
    yield "decode_lse", single(64, 9, 1000, 17)
    yield "decode_lse", single(3000, 3, data="hot_tail")
    yield "decode_lse", single(0, 300, data="large_logits")
    yield "decode_lse", decode((3, 3), (300, 63), data="needle")


def _multi_token() -> Listed:
    yield "decode_multi_token", decode((2,) * 3, (62, 63, 64), data="needle")
    yield "decode_multi_token", decode((4,) * 4, (0, 63, 255, 256), data="needle")
    yield "decode_multi_token", decode((3, 1, 2), (64, 5, 1000), data="needle")
    yield "decode_multi_token", decode((2, 2), (4000, 5), data="hot_tail")


def _pages() -> Listed:
    """Sizes of pages, and what stands behind the tokens in them."""
    for page in (16, 32, 128, 1):
        yield "paged_cache", single(15, 31, 63, 127, 333, page=page, data="needle")
    for page in (16, 32, 128):
        yield "paged_cache", decode((2, 2), (30, 254), page=page, data="needle")
    yield "paged_cache", single(127, 128, 62, 333, tails="minus", layers=2, data="needle")
    yield "paged_cache", single(130, 9, tails="huge", poison="inf", data="needle")
    yield "paged_cache", single(130, 9, pad=3, data="needle")
