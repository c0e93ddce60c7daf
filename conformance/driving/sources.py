"""The rooms that a verdict depends on, for digests that notice when a file of them has changed. No torch."""

from importlib.resources import files
from pathlib import Path

JUDGING_ROOMS = ("problems", "driving", "judging", "roles", "trials", "reference")
"""Rooms whose functions meet what a call returned."""
_DECIDING = ("cases", "vocabulary", *JUDGING_ROOMS)
"""What a case asks for, its procedure and its data, and what judges it; the reference has a digest of its own."""


def judging_sources() -> list[Path]:
    """The files that decide a verdict, beside the reference."""
    root = Path(str(files("mla_conformance")))
    rooms = (root / room for room in _DECIDING if room != "reference")
    return [path for room in rooms for path in sorted(room.rglob("*")) if path.suffix in (".py", ".toml")]
