"""Options that commands share, checked where they are read."""

import argparse
import re

REFERENCE = "NAME|module:Class|file.py:Class"
DEVICE = "cpu|cuda"
TIERS = "smoke|full|nightly"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """A positive time in seconds, or with a unit: ``90``, ``90s``, ``40m``, ``2h``.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smh]?)", text)
    value = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive time such as 90, 90s, 40m or 2h, got {text!r}")
    return value


def count(text: str) -> int:
    """A number of at least 1.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)
