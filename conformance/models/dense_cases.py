"""What an engine calls of a dense prefill: new tokens, chunks of context, and chunked contexts. No torch."""

from mla_conformance.cases.grammar import Listed, for_capability
from mla_conformance.models.profile import ModelProfile
from mla_conformance.roles.decode.case import decode, single
from mla_conformance.roles.layer.case import Order, layer
from mla_conformance.roles.prefill.case import chunk, chunked, new


def prefills() -> Listed:
    """New tokens, chunks of context, and chunked contexts that the reference or the backend merges."""
    yield from _new_tokens()
    yield from _results()
    yield from _context_chunks()
    yield from _chunked("chunked_context", "golden")
    yield "chunked_context", chunked((9,), (2100,), page=64, workspace=1024, data="hot_tail")
    yield from _chunked("merge_states", "own")


def _new_tokens() -> Listed:
    return for_capability(
        "new_tokens",
        new((1, 7, 64, 129, 257), data="needle"),
        new((65, 130), data="outliers"),
        new((300, 1), data="hot_tail"),
        new((15, 16, 17, 31, 32, 33), data="needle"),
        new((127, 128, 129), data="needle"),
        new((1,) * 32),
        new((128, 64), data="large_logits"),
        new((9, 130), data="low_rank"),
        new((40, 9), data="tiny_values"),
        lse=False,
    )


def _results() -> Listed:
    """The LSE, and the weights that an output shows."""
    yield "lse", new((64,))
    yield "lse", new((1, 7, 64, 129), data="needle")
    yield "lse", new((200,), data="large_logits")
    yield "lse", chunk((5, 1, 33, 64), (64, 9, 1000, 17))
    yield "lse", chunk((5, 9), (2000, 3), data="hot_tail")
    yield "weights", new((200,), data="ones")
    yield "weights", chunk((9,), (1000,), data="hot_ones")


def _context_chunks() -> Listed:
    yield "context_chunk", chunk((5, 9, 3, 33), (64, 5, 1000, 17), data="needle")
    yield "context_chunk", chunk((1, 100), (1500, 1), data="outliers")
    for length in (63, 64, 127, 128, 129, 257):
        yield "context_chunk", chunk((2, 5), (length, 40), data="needle")
    yield "context_chunk", chunk((3,) * 24, tuple(range(1, 25)))


def _chunked(capability: str, merge: str) -> Listed:
    """Contexts on and around the ends of chunks."""
    yield from for_capability(
        capability,
        chunked((5, 9, 3), (64, 0, 700), workspace=512, data="needle"),
        *(chunked((4, 4), (context, 100), data="needle") for context in (127, 128, 129, 256)),
        chunked((9, 30), (350, 20), data="large_logits"),
        chunked((3, 6, 2), (200, 333, 40), workspace=256, planner="greedy", data="needle"),
        page=64,
        merge=merge,
    )
    yield capability, chunked((3, 6), (200, 333), page=16, workspace=64, merge=merge, data="needle")


def decodes(layout: str) -> Listed:
    """One query token a request, and several."""
    yield from _single("decode" if layout == "auto" else f"kv_cache_{layout}")
    yield from _lse()
    yield from _multi_token()
    yield from _pages()
    yield "cuda_graph", single(1000, 17, 64, 300, 5, 129, 40, 9, data="needle")


def _single(capability: str) -> Listed:
    return for_capability(
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


def layers() -> Listed:
    """Batches of prefills and decodes through a whole layer."""
    yield from for_capability(
        "mixed_batch",
        layer((1, 1, 20, 9), (63, 64, 0, 300), 2, data="needle"),
        layer((2, 2, 9), (33, 150, 40), 2),
        page=64,
        order=Order.DECODES_FIRST,
    )
    yield "mixed_batch", layer((5, 9, 1, 1), (0, 140, 33, 7), 2, page=64, data="needle")
    yield "cache_write", layer((5, 1, 1), (60, 63, 64), 2, page=64, pad=2)


def weights(profile: ModelProfile) -> str:
    """What a layer's weights are like: each picks one latent, where there are as many as columns of a head."""
    nope, _, value, latent = profile.dims
    return "selection" if max(nope, value) <= latent else "dense"
