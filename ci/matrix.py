"""What README and pages show of the submissions of the newest suite: ``python ci/matrix.py``.

Every figure is read from a record; a table says which suite judged it, on what device, and when.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mla_conformance.certificate.certificate import Finding, Shown, read_shown
from mla_conformance.certificate.submission import RECORD_NAME
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import Section

ROOT = Path(__file__).parents[1]
SUBMISSIONS = ROOT / "submissions"
_KERNELS = (
    "| kernel | version | date | passed | known to fail | unsupported | not judged | worst of budget | LSE class |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
_OVERVIEW = "| kernel | library | passed | known to fail |\n|---|---|---|---|"
_FAILURES = "| kernel | cases | for example | why |\n|---|---|---|---|"


def newest(submissions: Path) -> list[Shown]:
    """The records of the newest suite that has any, by the names of their folders."""
    suites = [path for path in submissions.iterdir() if path.is_dir()]
    latest = max(suites, key=lambda path: tuple(map(int, path.name.split("."))))
    return [read_shown(path) for path in sorted(latest.glob(f"*/{RECORD_NAME}"))]


def overview(records: list[Shown]) -> str:
    """A short row for each record: of the cases that were judged, how many passed."""
    return "\n".join([_OVERVIEW, *map(_brief, records)])


def _brief(record: Shown) -> str:
    counts, reported = record.counts, record.versions or record.pins.versions
    library = " ".join(next(iter(reported.items()), ()))
    judged = counts.passed + counts.failed + counts.waived
    return _row([record.backend, library, f"{counts.passed} of {judged}", counts.waived or ""])


def kernels(records: list[Shown]) -> str:
    """A row for each record."""
    where = {f"{r.device}, torch {r.environment['torch']}, suite {r.suite}" for r in records}
    return "\n".join([*sorted(where), "", _KERNELS, *map(_kernel, records)])


def _kernel(record: Shown) -> str:
    counts = record.counts
    versions = ", ".join(f"{name} {version}" for name, version in record.distributions.items())
    cells = [
        *(record.backend, versions, record.date, f"{counts.passed}/{counts.listed}"),
        *(counts.waived, counts.unsupported, counts.unavailable, f"{record.worst_share:.2f}", _lse_class(record)),
    ]
    return _row(cells)


def _lse_class(record: Shown) -> str:
    """Of all roles, once each."""
    return ", ".join(dict.fromkeys(value for name, value in record.rounding.items() if name.split(": ")[-1] == "lse"))


def failures(records: list[Shown]) -> str:
    """A row for each reason why a kernel fails, with the shortest of the cases that show it."""
    return "\n".join([_FAILURES, *(row for record in records for row in _failures(record))])


def _failures(record: Shown) -> Iterator[str]:
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
    """The sections of README and pages under ``root``, each with what it should hold.

    Raises:
        InputError: a record is none, or a section's markers are missing.
    """
    records = newest(SUBMISSIONS)
    return [
        (Section.of(root / "README.md", "h200"), overview(records)),
        (Section.of(root / "docs" / "findings.md", "h200"), kernels(records)),
        (Section.of(root / "docs" / "findings.md", "failures"), failures(records)),
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
