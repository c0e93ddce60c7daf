"""What the numbers of a list of selected keys count. No torch: cases name it."""

from enum import StrEnum


class IndexSpace(StrEnum):
    """What is counted, from 0."""

    SLOT = "slot"
    """Entries of what is handed over: block · page + offset of a cache, rows of gathered keys."""
    POSITION = "position"
    """Tokens of the row's request, on all ranks."""
    RANK_LOCAL = "rank_local"
    """Those tokens of the row's request that this rank holds."""
