"""Values that are asked for again soon: the last used ones, within so many bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by key; the one that was used longest ago goes first, the last one that came stays in any case."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def find(self, key: Hashable) -> Value | None:
        """The value, if it is still there."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def keep(self, key: Hashable, value: Value, size: int, limit: int) -> Value:
        """Keep a value of ``size`` bytes, and of the earlier ones as many as ``limit`` bytes leave room for."""
        _, replaced = self._values.pop(key, (None, 0))
        self._values[key] = (value, size)
        self._bytes += size - replaced
        while len(self._values) > 1 and self._bytes > limit:
            _, (_, oldest) = self._values.popitem(last=False)
            self._bytes -= oldest
        return value

    def forget(self) -> None:
        """Keep nothing."""
        self._values.clear()
        self._bytes = 0
