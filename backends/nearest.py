"""The name that somebody meant who wrote another one."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like another one; empty if none is like it."""
    folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), folded, n=1)
    return folded[found[0]] if found else ""


def unknown(what: str, name: str, known: Iterable[str], listed_by: str, further: str = "") -> str:
    """What is said of an unknown name: which one was meant, or all there are if none is like it.

    Args:
        what: it should have named.
        name: the name.
        known: the names there are.
        listed_by: the command that lists them.
        further: what else may stand there, for the end of a list.
    """
    names = list(known)
    if meant := nearest(name, names):
        return f"unknown {what} '{name}'; did you mean {meant}? '{listed_by}' lists all"
    return f"unknown {what} '{name}'; expected one of {', '.join(names)}{further}"
