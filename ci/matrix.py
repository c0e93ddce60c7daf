"""What README and pages show of the submissions, of each kernel its newest: ``python ci/matrix.py``.

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
    "| kernel | version | date | passed | known to fail | unsupported | not judged | worst of budget |\n"
    "|---|---|---|---|---|---|---|---|"
)
_OVERVIEW = "| kernel | library | passed | known to fail |\n|---|---|---|---|"
_FAILURES = "| kernel | cases | for example | why |\n|---|---|---|---|"


def newest(submissions: Path) -> list[Shown]:
    """The newest record of each kernel, by the names of their folders."""
    suites = sorted(submissions.iterdir(), key=lambda path: _number(path.name))
    found = {path.parent.name: path for suite in suites for path in suite.glob(f"*/{RECORD_NAME}")}
    return [read_shown(found[name]) for name in sorted(found)]


def overview(records: list[Shown]) -> str:
    """A short row for each record of the newest suite: of the cases that were judged, how many passed."""
    return "\n".join([_OVERVIEW, *map(_brief, _of_newest(records)), "", outdated(records)])


def outdated(records: list[Shown]) -> str:
    """The kernels whose newest record is of an older suite, by suite."""
    suite = _of_newest(records)[0].suite
    older: dict[str, list[str]] = {}
    for record in records:
        if record.suite != suite:
            older.setdefault(record.suite, []).append(record.backend)
    return "\n".join(f"Outdated, of suite {name}: {', '.join(kernels)}." for name, kernels in older.items())


def _of_newest(records: list[Shown]) -> list[Shown]:
    latest = max((record.suite for record in records), key=_number)
    return [record for record in records if record.suite == latest]


def _number(suite: str) -> tuple[int, ...]:
    return tuple(map(int, suite.split(".")))


def _brief(record: Shown) -> str:
    counts, library = record.counts, " ".join(next(iter(record.distributions.items()), ()))
    judged = counts.passed + counts.failed + counts.waived
    return _row([record.backend, library, f"{counts.passed} of {judged}", counts.waived or ""])


def kernels(records: list[Shown]) -> str:
    """A row for each record of the newest suite."""
    latest = _of_newest(records)
    where = {f"{r.device}, torch {r.environment['torch']}, suite {r.suite}" for r in latest}
    return "\n".join([*sorted(where), "", _KERNELS, *map(_kernel, latest)])


def _kernel(record: Shown) -> str:
    counts = record.counts
    versions = ", ".join(f"{name} {version}" for name, version in record.distributions.items())
    cells = [
        *(record.backend, versions, record.date, f"{counts.passed}/{counts.listed}"),
        *(counts.waived, counts.unsupported, counts.unavailable, f"{record.worst_share:.2f}"),
    ]
    return _row(cells)


def failures(records: list[Shown]) -> str:
    """A row for each reason why a kernel of the newest suite fails, with the shortest of the cases that show it."""
    return "\n".join([_FAILURES, *(row for record in _of_newest(records) for row in _failures(record))])


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
