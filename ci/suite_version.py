"""Store what this version of the suite stands for: ``python ci/suite_version.py``.

What stands under other versions stays as it is. Once there are records of a version, sources that judge otherwise want
another version, in ``conformance/version.py``: ``mla-conformance verify`` would say so of each record. Sources that
judge alike are appended to the version's lists by ``ci/accept.py``.
"""

import json
from pathlib import Path

from mla_conformance.certificate.digests import must_pass_digest, version_digests
from mla_conformance.files.inputs import read_text
from mla_conformance.files.outputs import write_whole
from mla_conformance.version import SUITE_VERSION

FIXTURES = Path(__file__).parents[1] / "fixtures"


def store(name: str, value: object) -> None:
    """Write an entry of this version into a file of the fixtures."""
    path = FIXTURES / name
    known = json.loads(read_text(path)) if path.exists() else {}
    write_whole(path, json.dumps({**known, SUITE_VERSION: value}, indent=1) + "\n")


def main() -> None:
    """Store the digests of the must-pass list and of everything else that decides."""
    store("mustpass.json", must_pass_digest())
    store("suites.json", version_digests())


if __name__ == "__main__":
    main()
