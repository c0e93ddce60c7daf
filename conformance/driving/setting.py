"""One setting of the process: how to read it, how to put it back, and how to say that it changed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

UNREADABLE = "(unreadable)"
"""Stands for a value whose reading raised."""


def from_to(name: str, old: Any, now: Any) -> str:
    """What a plain value became; empty if it is the same."""
    return "" if old == now else f"{name} from {old} to {now}"


def each_from_to(name: str, old: dict[str, Any], now: dict[str, Any]) -> str:
    """What the values of a mapping became, each with its key; empty if all that were there are the same."""
    return "; ".join(from_to(f"{name} {key}", value, now.get(key)) for key, value in old.items() if now[key] != value)


def _nothing(_old: Any) -> None:
    """Restore nothing: there is no way."""


@dataclass(frozen=True)
class Setting:
    """A setting that a call must leave as it is.

    Attributes:
        name: how reports call it.
        read: its value now.
        restore: puts back a value that was read; without it a change is told only.
        tell: of name, old value and new one, what counts as a change, as a text; empty for none.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object] = _nothing
    tell: Callable[[str, Any, Any], str] = from_to

    @staticmethod
    def attribute(name: str, owner: Any, attribute: str) -> "Setting":
        """A setting that is an attribute of ``owner``."""
        return Setting(name, partial(getattr, owner, attribute), partial(setattr, owner, attribute))

    def value(self) -> Any:
        """What is read now; a call may have left a state that cannot be read."""
        try:
            return self.read()
        except Exception:
            return UNREADABLE

    def change(self, old: Any) -> str:
        """What became of a value that was read; values that a call left may refuse to be compared or printed."""
        now = self.value()
        if now is old:
            return ""
        try:
            return self.tell(self.name, old, now)
        except Exception:
            return self.name

    def undo(self, old: Any) -> str:
        """Put back a value that was read; tell if that fails."""
        try:
            self.restore(old)
        except Exception:
            return f"{self.name} could not be restored"
        return ""
