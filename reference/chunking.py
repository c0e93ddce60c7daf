"""Splitting the cached context of a batch of prefills into chunks of one workspace, by vLLM's two plans. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

MAX_WORKSPACE_TOKENS = 128 * 1024  # of context that is gathered at once; its up-projection is many times larger


@dataclass(frozen=True)
class ContextChunk:
    """One slice of every request's context, in tokens; both tuples have B entries."""

    starts: tuple[int, ...]  # first context token of the slice
    seq_lens: tuple[int, ...]  # its length, 0 where the request's context has ended

    @property
    def key_start_loc(self) -> tuple[int, ...]:
        """Where each request's keys begin in the gathered chunk: B + 1 cumulative lengths, the first 0."""
        return tuple(accumulate(self.seq_lens, initial=0))

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)


def plan_context_chunks(
    context_lens: Sequence[int], *, workspace_tokens: int, page_size: int
) -> tuple[ContextChunk, ...]:
    """Plan the chunks of contexts, one entry a prefill: chunk i holds the i-th of equal shares, whole pages."""
    with_context = sum(length > 0 for length in context_lens)
    if with_context == 0:
        return ()
    share = workspace_tokens // with_context // page_size * page_size
    if share < 1:
        raise ValueError(
            f"workspace_tokens must be at least {with_context * page_size} ({with_context} contexts of one page of "
            f"{page_size} tokens), got {workspace_tokens}; enlarge the workspace or prefill fewer requests at once"
        )
    return tuple(
        ContextChunk(
            starts=(start,) * len(context_lens),
            seq_lens=tuple(min(max(length - start, 0), share) for length in context_lens),
        )
        for start in range(0, max(context_lens), share)
    )


def pack_context_chunks(
    context_lens: Sequence[int], *, workspace_tokens: int, page_size: int
) -> tuple[ContextChunk, ...]:
    """Plan the chunks of the same contexts greedily: what is left of a context follows the one before it while it fits.

    One that does not fit is split at the last page boundary that does, which ends the chunk, as does a request without
    context. So the requests of a chunk stand side by side, and only the first may have begun in an earlier chunk.
    """
    if any(context_lens) and workspace_tokens < page_size:
        raise ValueError(f"workspace_tokens must be at least {page_size} (one page), got {workspace_tokens}")
    chunks: list[ContextChunk] = []
    taken: dict[int, tuple[int, int]] = {}  # start and length of each request's row in the chunk that is filled

    def end() -> None:
        starts, lengths = zip(*[taken.get(request, (0, 0)) for request in range(len(context_lens))], strict=True)
        chunks.append(ContextChunk(starts=starts, seq_lens=lengths))
        taken.clear()

    for request, length in enumerate(context_lens):
        start = 0
        while start < length:
            room = workspace_tokens - sum(taken_length for _, taken_length in taken.values())
            fits = length - start if length - start <= room else room // page_size * page_size
            if fits:
                taken[request] = start, fits
                start += fits
            if start < length:
                end()
        if length == 0 and taken:
            end()
    if taken:
        end()
    return tuple(chunks)


PLANNERS: Mapping[str, Callable[..., tuple[ContextChunk, ...]]] = {  # by name in a case
    "equal": plan_context_chunks,
    "greedy": pack_context_chunks,
}
