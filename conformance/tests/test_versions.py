"""A suite version stands for one list, one tolerance, one specification and one judge."""

import json
from importlib.resources import files

from mla_conformance.certificate.digests import EARLIER, LOCKED, version_digests
from mla_conformance.version import SUITE_VERSION

STORED = json.loads((files("mla_conformance.fixtures") / "suites.json").read_text())
DO = (
    "sources that decide verdicts have changed since this version was stored: show by ci/lock.py and ci/accept.py that "
    "verdicts are as before, or raise conformance/version.py if there are records of it, and run ci/suite_version.py"
)


def test_this_version_is_what_was_stored_of_it() -> None:
    here = version_digests()
    stored = STORED[SUITE_VERSION]
    latest = {name: digests for name, digests in stored.items() if name != EARLIER}
    assert {**latest, **{name: stored[name][-1:] for name in LOCKED}} == here, DO


def test_no_two_versions_are_the_same() -> None:
    assert len({json.dumps(stored, sort_keys=True) for stored in STORED.values()}) == len(STORED)
