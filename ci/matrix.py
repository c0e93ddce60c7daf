"""What pages show of the records, of each kernel its newest: ``python ci/matrix.py``.

Every figure is read from a record; a table says which suite judged it, on what device, and when.
"""

import re
from collections import Counter
from pathlib import Path

import pages
from msgspec import structs

from mla_conformance.certificate.certificate import Certificate
from mla_conformance.certificate.records import read_records
from mla_conformance.files.whole import InputError, Section
from mla_conformance.report.causes import grouped
from mla_conformance.scoreboard.board import Entry

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "fixtures" / "records"
_REST = re.compile("; |, (?:so that|such as|whose) ")


def newest(folder: Path) -> list[Certificate]:
    """The newest record of each kernel, and those of its suite in other versions or on other devices, which say so."""
    records = []
    for line in (line for path in sorted(folder.glob("*.jsonl")) for line in read_records(path)):
        if line.kept is None:
            raise InputError(line.why)
        records.append(line.kept.certificate)
    found = []
    for _, group in sorted(grouped(records, lambda record: record.backend).items()):
        first, *others = sorted(group, key=lambda record: Entry(record, "").order, reverse=True)
        found.append(first)
        for each in (each for each in others if each.suite == first.suite):
            version, known = (next(iter(record.distributions.values()), "") for record in (each, first))
            name = f"{each.backend} ({version if version != known else each.device})"
            found.append(structs.replace(each, backend=name))
    return found


def kernels(records: list[Certificate]) -> str:
    """A line for each record below where and when it was made; first where most were."""
    made = grouped(records, lambda r: f"{r.device}, torch {r.environment['torch']}, suite {r.suite}, {r.date}")
    parts = []
    for place, group in sorted(made.items(), key=lambda each: -len(each[1])):
        rows = []
        for record in group:
            counts = record.counts
            name, version = next(iter(record.distributions.items()))
            lacking = f", {counts.unavailable} lacked memory" if counts.unavailable else ""
            known = f", {counts.waived} known" if counts.waived else ""
            rows.append(f"- {record.backend}, {name} {version}: {counts.passed}/{counts.listed}{known}{lacking}")
        parts.append("\n".join([f"{place}:", "", *rows]))
    return "\n\n".join(parts)


def failures(records: list[Certificate]) -> str:
    """A line for each reason why kernels fail, shortened, with the shortest of the cases that show it."""
    found = ((record.backend, finding) for record in records for finding in record.findings)
    rows = []
    for reason, group in grouped(found, lambda each: shortened(each[1].expectation)).items():
        kernels = Counter(backend for backend, _ in group)
        example = min((finding.case for _, finding in group), key=lambda case: (len(case), case))
        told = ", ".join(f"{backend} {number}" for backend, number in kernels.items())
        rows.append(f"- {told}: {reason}: `{example}`")
    return "\n".join(rows)


def shortened(expectation: str) -> str:
    """The first part of a reason, without the place of the entry that says it."""
    return _REST.split(expectation.partition(": ")[2].removeprefix("bug: "))[0]


def sections(root: Path) -> list[tuple[Section, str]]:
    records = newest(RECORDS)
    return [
        (Section.of(root / "docs" / "findings.md", "h200"), kernels(records)),
        (Section.of(root / "docs" / "findings.md", "failures"), failures(records)),
    ]


if __name__ == "__main__":
    pages.write(sections(ROOT))
