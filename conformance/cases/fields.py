"""Cases as lists of them are written: fields, each beside the capability that they decide. No torch."""

from collections.abc import Iterable, Iterator
from typing import Any

Fields = dict[str, Any]
Lengths = tuple[int, ...]
Listed = Iterator[tuple[str, Fields]]


def each(lists: Iterable[Fields], **fields: Any) -> Iterator[Fields]:
    """Every case of ``lists`` with further fields."""
    return ({**case, **fields} for case in lists)


def with_fields(listed: Iterable[tuple[str, Fields]], further: Fields) -> Listed:
    """The same with further fields."""
    return ((capability, {**fields, **further}) for capability, fields in listed)


def for_capability(capability: str, *fields: Fields, **further: Any) -> Listed:
    """Cases of one capability, all with the further fields."""
    return ((capability, case) for case in each(fields, **further))
