"""Store what this version of the suite stands for: ``python ci/suite_version.py``.

What stands under other versions stays as it is. Once there are records of a version, sources that judge otherwise want
another version, in ``conformance/version.py``: ``mla-conformance verify`` would say so of each record. Sources that
judge alike are appended to the version's lists by ``ci/accept.py``. A case that is added changes nothing of this.
"""

import json
from pathlib import Path

from mla_conformance.certificate.verify import LOCKED, SOURCES, version_digests
from mla_conformance.files.whole import read_text, write_whole
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.report.json_report import to_text
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import first_cases

FIXTURES = Path(__file__).parents[1] / "fixtures"


if __name__ == "__main__":
    stored = {name: json.loads(read_text(FIXTURES / name)) for name in ("mustpass.json", "suites.json")}
    stored["mustpass.json"][SUITE_VERSION] = MustPass.of_cases(first_cases()).digest
    # Of a version that is known the sources that judge alike are kept.
    known = stored["suites.json"].get(SUITE_VERSION, {})
    kept = {name: known[name] for name in (*LOCKED, SOURCES) if name in known}
    stored["suites.json"][SUITE_VERSION] = version_digests() | kept
    for name, versions in stored.items():
        write_whole(FIXTURES / name, to_text(versions))
