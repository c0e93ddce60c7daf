"""The files that a verdict depends on, for digests that notice when one of them has changed."""

from importlib.resources import files
from pathlib import Path

_PATTERNS = (
    "cases/hazards.py",
    "problems/*.py",
    "driving/*.py",
    "judging/*.py",
    "judging/*.toml",
    "trials/*.py",
    "suite/test_*.py",
)


def judging_sources() -> list[Path]:
    """The files that decide a verdict, beside the cases and the reference."""
    root = Path(str(files("mla_conformance")))
    return [path for pattern in _PATTERNS for path in sorted(root.glob(pattern))]
