"""Store what this version of the suite stands for: ``python ci/suite_version.py``.

What stands under other versions stays as it is. Once there are records of a version, sources that judge otherwise want
another version, in ``conformance/version.py``: ``mla-conformance verify`` would say so of each record. Sources that
judge alike are appended to the version's lists by ``ci/accept.py``. A list of cases that grew leaves records valid for
what they judged: its digest before is kept.
"""

import json
from pathlib import Path
from typing import Any

from mla_conformance.certificate.digests import EARLIER, LOCKED, NUMBER, SOURCES, installed_digests, version_digests
from mla_conformance.files.whole import read_text, write_whole
from mla_conformance.version import SUITE_VERSION

FIXTURES = Path(__file__).parents[1] / "fixtures"


def grown(known: dict[str, Any] | None) -> dict[str, Any]:
    """What the version stands for: of one that is known the sources that judge alike, and the lists before this one."""
    here = version_digests()
    if not known:
        return here
    earlier = {**known.get(EARLIER, {}), known["cases"]: known[NUMBER]}
    earlier.pop(here["cases"], None)
    kept = {name: known[name] for name in (*LOCKED, SOURCES) if name in known}
    return {**here, **kept, **({EARLIER: earlier} if earlier else {})}


if __name__ == "__main__":
    for name, change in (("mustpass.json", lambda _: installed_digests()["must_pass"]), ("suites.json", grown)):
        path = FIXTURES / name
        stored = json.loads(read_text(path)) if path.exists() else {}
        write_whole(path, json.dumps({**stored, SUITE_VERSION: change(stored.get(SUITE_VERSION))}, indent=1) + "\n")
