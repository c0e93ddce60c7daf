"""The files that a verdict depends on, for digests that notice when one of them has changed."""

from importlib.resources import files
from pathlib import Path

_OF_CASES = ("cached", "capabilities", "case", "decode", "hazards", "indexer", "layer", "prefill", "sparse")
"""What a case asks for, its procedure and its data; the lists of cases and how ids are read are not among them."""
_PATTERNS = (
    *(f"cases/{name}.py" for name in _OF_CASES),
    "problems/*.py",
    "driving/*.py",
    "judging/*.py",
    "judging/*.toml",
    "trials/*.py",
)


def judging_sources() -> list[Path]:
    """The files that decide a verdict, beside the lists of cases and the reference."""
    root = Path(str(files("mla_conformance")))
    return [path for pattern in _PATTERNS for path in sorted(root.glob(pattern))]
