"""The README's table of judged kernels, from ``ci/certificates``: ``python ci/matrix.py README.md``.

Every figure is read from a record; the table says which suite judged it, on what device, and when.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.report.counts import Counts

RECORDS = Path(__file__).parent / "certificates"
_SECTION = re.compile(r"(<!-- h200:begin -->\n).*?(<!-- h200:end -->)", re.DOTALL)
_HEAD = (
    "| kernel | version | date | passed | failed | unsupported | not judged | worst of budget | LSE class |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table(folder: Path) -> str:
    """The Markdown table of one device's records."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    where = {f"{r['environment']['device']}, torch {r['environment']['torch']}, suite {r['suite']}" for r in records}
    return "\n".join([*sorted(where), "", _HEAD, *map(_row, records)])


def _row(record: dict[str, Any]) -> str:
    counts = sum((msgspec.convert(capability, Counts) for capability in record["capabilities"].values()), Counts())
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    worst = max((entry["share"] for entry in record["error_budget_used"].values()), default=0.0)
    emulated = " (emulated, never certified)" if record["emulated"] else ""
    unjudged = counts.unavailable + counts.waived + counts.not_run
    cells = [
        *(record["backend"] + emulated, versions, record["date"], f"{counts.passed}/{counts.listed}"),
        *(counts.failed, counts.unsupported, unjudged, f"{worst:.2f}", record["rounding"]["lse"]),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def rewrite(readme: str) -> str:
    """The README with its section made anew.

    Raises:
        ValueError: the section's markers are missing.
    """
    if not _SECTION.search(readme):
        raise ValueError("expected the markers <!-- h200:begin --> and <!-- h200:end --> in the README")
    return _SECTION.sub(lambda found: f"{found[1]}{table(RECORDS / 'h200')}\n{found[2]}", readme)


def main() -> None:
    """Rewrite the section in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=Path)
    path: Path = parser.parse_args().readme
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
