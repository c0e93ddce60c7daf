"""List the sources that are here among those that judge alike: ``python ci/accept.py BEFORE AFTER RECORD...``.

BEFORE and AFTER are locks that ``ci/lock.py write`` wrote, by sources that the suite's version lists and by those that
are here; each RECORD is a file of ``certify --record``, of a kernel that these sources judged on a GPU of the compute
capability of its record in ``fixtures/records``. Nothing is listed unless the rows of the locks are equal but for
messages and cases that were added, and at least four records give the statuses and the worst uses of those handed in.
Adapters are listed, too, which records pin; those of kernels that were not judged again are named.
Exit status: 0 listed, 1 something differs, 2 usage or a file that is not what it should be.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import lock

from mla_conformance.backends.references import known_backends, known_variants
from mla_conformance.certificate.certificate import RECORDS, read_certificate
from mla_conformance.certificate.records import kept_records
from mla_conformance.certificate.verify import FITTED, LOCKED, SOURCES, installed_digests, locked_digests, seal
from mla_conformance.defects.report import deciding_digest
from mla_conformance.files.installed import module_file, source_digest, source_name
from mla_conformance.files.whole import InputError, read_text, write_whole
from mla_conformance.report.differences import contradicts
from mla_conformance.report.json_report import to_text
from mla_conformance.version import SUITE_VERSION

ROOT = Path(__file__).parents[1]
LEAST_RECORDS = 4
_GPU = "compute_capability"


def problems(before: Path, after: Path, records: Sequence[Path]) -> Iterator[str]:
    """Why the sources are not listed; of records what one of both had no memory for is not compared."""
    (old, _), (new, _) = lock.read(before), lock.read(after)
    for name in LOCKED:
        if old["digests"][name] not in locked_digests()[name]:
            known = ", ".join(locked_digests()[name])
            yield f"{before}: '{name}' of suite {SUITE_VERSION}: expected one of {known}, got {old['digests'][name]}"
    if new["digests"] != installed_digests() or new["small"]:
        yield f"{after}: expected all rows, written by the sources that are here"
    found = {certificate.backend: certificate for certificate in map(read_certificate, records)}
    if len(found) < LEAST_RECORDS:
        yield f"expected records of {LEAST_RECORDS} kernels or more, got {len(found)}"
    for backend, here in found.items():
        if here.seal != seal(here):
            yield f"{backend}: the seal does not fit the record: it was changed after it was issued"
        known = [each.certificate for each in kept_records(ROOT / RECORDS) if each.certificate.backend == backend]
        alike = [each for each in known if each.environment.get(_GPU) == here.environment.get(_GPU)]
        submitted = max(alike, key=lambda each: (each.pins.versions == here.pins.versions, each.date), default=None)
        if submitted is None or here.digests != installed_digests() | {FITTED: submitted.digests[FITTED]}:
            devices = ", ".join(each.device for each in known) or "none"
            yield f"{backend}: expected a record of these sources and a GPU like {devices}, got {here.device}"
        for case, status in submitted.cases.items() if submitted else ():
            if contradicts(status, now := here.cases.get(case)):
                yield f"{backend} {case}: {status} then, {now} now"
        if submitted and here.worst != submitted.worst:
            yield f"{backend}: worst uses {submitted.worst} then, {here.worst} now"


def append(records: Sequence[Path]) -> None:
    suites, defects = ROOT / "fixtures" / "suites.json", ROOT / "fixtures" / "defects.json"
    stored, report, here = json.loads(read_text(suites)), json.loads(read_text(defects)), installed_digests()
    for name in LOCKED:
        stored[SUITE_VERSION][name] = _with_last(stored[SUITE_VERSION][name], here[name])
    report["digests"] = _with_last(report["digests"], deciding_digest())
    sources: dict[str, list[str]] = stored[SUITE_VERSION].setdefault(SOURCES, {})
    kept = [each.certificate for each in kept_records(ROOT / RECORDS)]
    for name, digest in (pin for certificate in kept for pin in certificate.pins.sources.items()):
        if name.startswith("mla_conformance.") and digest not in sources.get(name, ()):
            sources.setdefault(name, []).append(digest)
    modules = (module for backend in (*known_backends(), *known_variants()) for module in backend.modules())
    for name in sorted({*sources, *map(source_name, modules)}):
        if (path := module_file(name)) is not None:
            sources[name] = _with_last(sources.get(name, []), source_digest(name, path))
    again = {certificate.backend for certificate in map(read_certificate, records)}
    sys.stdout.write(f"not judged again: {', '.join(sorted({each.backend for each in kept} - again)) or 'none'}\n")
    for path, value in ((suites, stored), (defects, report)):
        write_whole(path, to_text(value))


def _with_last(listed: list[str], digest: str) -> list[str]:
    return [*(each for each in listed if each != digest), digest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    options = parser.parse_args()
    try:
        found = list(problems(options.before, options.after, options.records))
        for problem in found:
            sys.stderr.write(f"{problem}\n")
        if found or lock.compare(options.before, options.after):
            return 1
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    append(options.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
