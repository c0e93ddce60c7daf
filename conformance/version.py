"""Version of the distribution, read by the build."""

import re

__version__ = "2026.11.0"
SUITE_VERSION = ".".join(__version__.split(".")[:2])
"""Version of the case list and of what a verdict means."""


def numbers_of(version: str) -> tuple[int, ...]:
    """What versions are ordered by."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version))
