"""Which wheels the modules that a process has loaded came from."""

import base64
import csv
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mla_conformance.files.installed import harness_files
from mla_conformance.files.places import place_of

_EVERYBODYS = ("mla-conformance", "torch", "numpy")
_CHOSEN = "triton"
"""Torch brings it, and kernels are written in it."""


def owned_by_wheels(loaded: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The distributions whose wheels hold what was loaded, and what is in no wheel as it was loaded.

    What every process of the harness has, torch and the harness among it, is left out.

    Args:
        loaded: SHA-256 of modules by path.
    """
    harness = {str(path.resolve()) for path in harness_files().values()}
    owners = packages_distributions() if loaded.keys() - harness else {}
    found, own = dict[str, None](), dict[str, str]()
    for path, digest in loaded.items():
        name = place_of(Path(path))
        top = name.partition("/")[0].removesuffix(".py")
        said = "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(digest)).decode().rstrip("=")
        owner = next((each for each in owners.get(top, ()) if _recorded(each).get(name) == said), None)
        if owner is None and path not in harness:
            own[path] = digest
        elif owner is not None and canonicalize_name(owner) not in _everybodys():
            found[owner] = None
    return sorted(found), own


@cache
def _recorded(name: str) -> dict[str, str]:
    """What a wheel's RECORD says of its files, by their names: the digest in URL-safe base64 without padding."""
    lines = csv.reader((distribution(name).read_text("RECORD") or "").splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 3}


@cache
def _everybodys() -> frozenset[str]:
    """What the harness needs, and what that needs."""
    found, left = set[str](), list(_EVERYBODYS)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            left += _needed(name)
    return frozenset(found - {_CHOSEN})


def _needed(name: str) -> list[str]:
    try:
        asked = map(Requirement, distribution(name).requires or ())
    except PackageNotFoundError:
        return []
    return [each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
