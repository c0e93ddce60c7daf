"""What README and FINDINGS show of ``ci/certificates``: ``python ci/matrix.py``.

Every figure is read from a record; a table says which suite judged it, on what device, and when.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mla_conformance.certificate.certificate import Certificate, Finding, read_certificate
from mla_conformance.files.inputs import InputError
from mla_conformance.files.sections import Section

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "ci" / "certificates" / "h200"
_KERNELS = (
    "| kernel | version | date | passed | known to fail | unsupported | not judged | worst of budget | LSE class |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
_FAILURES = "| kernel | cases | for example | why |\n|---|---|---|---|"


def kernels(records: list[Certificate]) -> str:
    """A row for each record."""
    where = {f"{r.device}, torch {r.environment['torch']}, suite {r.suite}" for r in records}
    return "\n".join([*sorted(where), "", _KERNELS, *map(_kernel, records)])


def _kernel(record: Certificate) -> str:
    counts = record.counts
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    worst = max((entry.share for entry in record.worst.values()), default=0.0)
    cells = [
        *(record.backend, versions, record.date, f"{counts.passed}/{counts.listed}"),
        *(counts.waived, counts.unsupported, counts.unavailable, f"{worst:.2f}", _lse_class(record)),
    ]
    return _row(cells)


def _lse_class(record: Certificate) -> str:
    """Of all roles, once each."""
    return ", ".join(dict.fromkeys(value for name, value in record.rounding.items() if name.split(": ")[-1] == "lse"))


def failures(records: list[Certificate]) -> str:
    """A row for each reason why a kernel fails, with the shortest of the cases that show it."""
    return "\n".join([_FAILURES, *(row for record in records for row in _failures(record))])


def _failures(record: Certificate) -> Iterator[str]:
    for expectation, number in Counter(finding.expectation for finding in record.findings).most_common():
        found = [finding for finding in record.findings if finding.expectation == expectation]
        example = min(found, key=lambda finding: (len(finding.case), finding.case)).case
        yield _row([record.backend, number, f"`{example}`", _reason(found[0])])


def _reason(finding: Finding) -> str:
    """Without the place of the entry that says it."""
    return finding.expectation.partition(": ")[2]


def _row(cells: list[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def sections(root: Path) -> list[tuple[Section, str]]:
    """The sections of README and FINDINGS under ``root``, each with what it should hold.

    Raises:
        InputError: a record is none, or a section's markers are missing.
    """
    records = [read_certificate(path) for path in sorted(RECORDS.glob("*.json"))]
    return [
        (Section.of(root / "README.md", "h200"), kernels(records)),
        (Section.of(root / "ci" / "FINDINGS.md", "h200"), failures(records)),
    ]


def main() -> None:
    """Rewrite the sections in place."""
    try:
        for section, content in sections(ROOT):
            section.write(content)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
