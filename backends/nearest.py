"""The name that somebody meant who wrote another one."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?``, for the end of what is said of an unknown name; empty if no known one is like it."""
    folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), folded, n=1)
    return f"; did you mean {folded[found[0]]}?" if found else ""
