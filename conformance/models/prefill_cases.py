"""What an engine calls of a dense prefill: new tokens, chunks of context, and chunked contexts. No torch."""

from mla_conformance.cases.prefill_caselists import chunk, chunked, new
from mla_conformance.models.listed import Listed, deciding


def prefills() -> Listed:
    """New tokens, chunks of context, and chunked contexts that the reference or the backend merges."""
    yield from _new_tokens()
    yield from _results()
    yield from _context_chunks()
    yield from _chunked("chunked_context", "golden")
    yield "chunked_context", chunked((9,), (2100,), page=64, workspace=1024, data="hot_tail")
    yield from _chunked("merge_states", "own")


def _new_tokens() -> Listed:
    return deciding(
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
    yield from deciding(
        capability,
        chunked((5, 9, 3), (64, 0, 700), workspace=512, data="needle"),
        *(chunked((4, 4), (context, 100), data="needle") for context in (127, 128, 129, 256)),
        chunked((9, 30), (350, 20), data="large_logits"),
        chunked((3, 6, 2), (200, 333, 40), workspace=256, planner="greedy", data="needle"),
        page=64,
        merge=merge,
    )
    yield capability, chunked((3, 6), (200, 333), page=16, workspace=64, merge=merge, data="needle")
