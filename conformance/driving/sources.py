"""The rooms that a verdict depends on, for digests that notice when a file of them has changed. No torch."""

from importlib.resources import files
from pathlib import Path

_DECIDING = ("cases", "vocabulary", "problems", "driving", "judging", "roles", "trials")
"""What a case asks for, its procedure and its data, and what judges it; the reference has a digest of its own."""


def judging_sources() -> list[Path]:
    """The files that decide a verdict, beside the reference."""
    root = Path(str(files("mla_conformance")))
    return [path for room in _DECIDING for path in sorted((root / room).rglob("*")) if path.suffix in (".py", ".toml")]
