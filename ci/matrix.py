"""What README and pages show of the records, of each kernel its newest: ``python ci/matrix.py``.

Every figure is read from a record; a table says which suite judged it, on what device, and when.
"""

import sys
from collections import Counter
from pathlib import Path

from msgspec import structs

from mla_conformance.certificate.certificate import Finding, Shown, shown_of
from mla_conformance.certificate.records import RecordLine, read_records, suite_order
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import Section
from mla_conformance.report.causes import grouped
from mla_conformance.scoreboard.entry import Entry

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "fixtures" / "records"
_KERNELS = "| kernel | version | passed | known to fail | worst of budget |\n|---|---|---|---|---|"
_OVERVIEW = "| library | right | some known to fail |\n|---|---|---|"
_FAILURES = "| kernels, cases | for example | why |\n|---|---|---|"


def newest(folder: Path) -> list[Shown]:
    """The newest record of each kernel, and those of its suite in other versions or on other devices, which say so."""
    records = [_shown(line) for path in sorted(folder.glob("*.jsonl")) for line in read_records(path)]
    found = []
    for _, group in sorted(grouped(records, lambda record: record.backend).items()):
        first, *others = sorted(group, key=lambda record: Entry(record, "").order, reverse=True)
        found += [first, *(_named(each, first) for each in others if each.suite == first.suite)]
    return found


def _shown(line: RecordLine) -> Shown:
    if line.kept is None:
        raise InputError(line.why)
    return shown_of(line.kept.certificate)


def _named(record: Shown, first: Shown) -> Shown:
    version, known = (next(iter(each.distributions.values()), "") for each in (record, first))
    return structs.replace(record, backend=f"{record.backend} ({version if version != known else record.device})")


def overview(records: list[Shown]) -> str:
    """A row for each library of the newest suite's records on a GPU: how many judged cases its kernels passed."""
    libraries: dict[str, list[Shown]] = {}
    for record in (each for each in _of_newest(records) if each.device != "cpu"):
        libraries.setdefault(" ".join(next(iter(record.distributions.items()), ())), []).append(record)
    return "\n".join([_OVERVIEW, *(_brief(*library) for library in libraries.items()), "", outdated(records)]).strip()


def outdated(records: list[Shown]) -> str:
    """The kernels whose newest record is of an older suite, by suite."""
    suite = _of_newest(records)[0].suite
    older: dict[str, list[str]] = {}
    for record in records:
        if record.suite != suite:
            older.setdefault(record.suite, []).append(record.backend)
    return "\n".join(f"Outdated, of suite {name}: {', '.join(kernels)}." for name, kernels in older.items())


def _of_newest(records: list[Shown]) -> list[Shown]:
    latest = max((record.suite for record in records), key=suite_order)
    return [record for record in records if record.suite == latest]


def _brief(library: str, records: list[Shown]) -> str:
    right = [f"{record.backend} {record.counts.passed}" for record in records if not record.counts.waived]
    wrong = [
        f"{record.backend} {counts.passed} of {counts.passed + counts.failed + counts.waived}"
        for record in records
        if (counts := record.counts).waived
    ]
    return _row([library, ", ".join(right), ", ".join(wrong)])


def kernels(records: list[Shown]) -> str:
    """A row for each record of the newest suite."""
    latest = _of_newest(records)
    return "\n".join([_places(latest), "", _KERNELS, *map(_kernel, latest)])


def _places(records: list[Shown]) -> str:
    """Where and when the records were made: most of them, then the others by name."""
    made: dict[str, list[str]] = {}
    for r in records:
        made.setdefault(f"{r.device}, torch {r.environment['torch']}, suite {r.suite}, {r.date}", []).append(r.backend)
    most, *others = sorted(made, key=lambda place: -len(made[place]))
    return "; ".join([most, *(f"{', '.join(made[place])}: {place}" for place in others)])


def _kernel(record: Shown) -> str:
    counts = record.counts
    behind = [f"{name} {version}" for name, version in record.distributions.items()]
    versions = ", ".join(each for each in behind if each == behind[0] or not each.startswith("torch "))
    lacking = f", {counts.unavailable} lacked memory" if counts.unavailable else ""
    passed = f"{counts.passed}/{counts.listed}{lacking}"
    return _row([record.backend, versions, passed, counts.waived, f"{record.worst_share:.2f}"])


def failures(records: list[Shown]) -> str:
    """A row for each reason why kernels of the newest suite fail, with the shortest of the cases that show it."""
    reasons: dict[str, list[tuple[str, Finding]]] = {}
    for record in _of_newest(records):
        for finding in record.findings:
            reasons.setdefault(_reason(finding), []).append((record.backend, finding))
    return "\n".join([_FAILURES, *(_failure(reason, found) for reason, found in reasons.items())])


def _failure(reason: str, found: list[tuple[str, Finding]]) -> str:
    kernels = Counter(backend for backend, _ in found)
    example = min((finding.case for _, finding in found), key=lambda case: (len(case), case))
    return _row([", ".join(f"{backend} {number}" for backend, number in kernels.items()), f"`{example}`", reason])


def _reason(finding: Finding) -> str:
    """Without the place of the entry that says it."""
    return finding.expectation.partition(": ")[2]


def _row(cells: list[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def sections(root: Path) -> list[tuple[Section, str]]:
    """The sections of README and pages under ``root``, each with what it should hold."""
    records = newest(RECORDS)
    return [
        (Section.of(root / "README.md", "h200"), overview(records)),
        (Section.of(root / "docs" / "findings.md", "h200"), kernels(records)),
        (Section.of(root / "docs" / "findings.md", "failures"), failures(records)),
    ]


def main() -> None:
    try:
        for section, content in sections(ROOT):
            section.write(content)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
