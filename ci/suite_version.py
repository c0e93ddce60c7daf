"""Store what this version of the suite stands for: ``python ci/suite_version.py``.

What stands under other versions stays as it is. Once there are records of a version, sources that judge otherwise want
another version, in ``conformance/version.py``: ``mla-conformance verify`` would say so of each record. Sources that
judge alike are appended to the version's lists by ``ci/accept.py``. A case that is added changes nothing of this.
"""

import json
from importlib.resources import files
from pathlib import Path

from mla_conformance.certificate.verify import LOCKED, NUMBER, SOURCES, cases_digest, installed_digests
from mla_conformance.files.installed import meaning_digest
from mla_conformance.files.whole import read_text, write_whole
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.report.json_report import to_text
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import first_cases

FIXTURES = Path(__file__).parents[1] / "fixtures"


def version_digests() -> dict[str, str | int | list[str]]:
    """What this version stands for, as ``suites.json`` holds it; lists grow by ``ci/accept.py``.

    A list of cases that grows is pinned as it began: a line says itself that it was added.
    """
    here, first = installed_digests(), tuple(case.id for case in first_cases())
    words = (files("mla_conformance") / "SPEC.md").read_text(encoding="utf-8").split()
    of_list: dict[str, str | int | list[str]] = {"cases": cases_digest(first), NUMBER: len(first)}
    return {**of_list, "spec": meaning_digest((), *words), **{name: [here[name]] for name in LOCKED}}


if __name__ == "__main__":
    stored = {name: json.loads(read_text(FIXTURES / name)) for name in ("mustpass.json", "suites.json")}
    stored["mustpass.json"][SUITE_VERSION] = MustPass.of_cases(first_cases()).digest
    # Of a version that is known the sources that judge alike are kept.
    known = stored["suites.json"].get(SUITE_VERSION, {})
    kept = {name: known[name] for name in (*LOCKED, SOURCES) if name in known}
    stored["suites.json"][SUITE_VERSION] = version_digests() | kept
    for name, versions in stored.items():
        write_whole(FIXTURES / name, to_text(versions))
