"""A suite version stands for one list, one tolerance, one specification and one judge."""

import json
from importlib.resources import files

from mla_conformance.certificate.digests import version_digests
from mla_conformance.version import SUITE_VERSION

STORED = json.loads((files("mla_conformance.fixtures") / "suites.json").read_text())
DO = (
    "what a verdict means has changed since this version was stored: raise conformance/version.py if there are records "
    "of it under submissions/, then run: python ci/suite_version.py"
)


def test_this_version_is_what_was_stored_of_it() -> None:
    assert STORED.get(SUITE_VERSION) == version_digests(), DO


def test_no_two_versions_are_the_same() -> None:
    assert len({json.dumps(stored, sort_keys=True) for stored in STORED.values()}) == len(STORED)
