"""Version of the distribution, read by the build."""

import re

__version__ = "2026.13.6"
SUITE_VERSION = ".".join(__version__.split(".")[:2])
"""Version of the case list and of what a verdict means."""

Version = tuple[int, ...]
"""What a version is ordered by: year, suite and patch."""


def numbers_of(version: str) -> Version:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version))
