"""Cut one certificate per backend out of a run's report: ``python ci/certificate.py RUN_FOLDER --date YYYY-MM-DD``.

A certificate is the backend's part of ``report.json`` with the run's environment, the worst use of the error budget by
rule from the journal, and what the machine's owner adds by ``--fact``. Nothing in it is edited.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

SCHEMA = "mla-conformance-certificate/1"


def certificates(run: Path, date: str, facts: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Certificates of the backends that were judged, by name."""
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    records = _records(run / "journal.jsonl")
    head = {"schema": SCHEMA, "date": date, "suite": report["suite"], "environment": report["environment"] | facts}
    return {
        name: {
            **head,
            "backend": name,
            **{key: value for key, value in part.items() if key != "records"},
            "error_budget_used": _worst([record for record in records if record["backend"] == name]),
            "seconds": _seconds([record for record in records if record["backend"] == name]),
        }
        for name, part in report["backends"].items()
        if part["capabilities"]  # a backend that cannot run has none
    }


def _records(journal: Path) -> list[dict[str, Any]]:
    events = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    return [event["record"] for event in events if event["event"] == "verdict"]


def _seconds(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Wall time of all trials, by phase, and the longest calls of one: the first ones plan and compile."""
    phases = sorted({name for record in records for name in record["phases"]})
    total = {name: round(sum(record["phases"].get(name, 0.0) for record in records), 1) for name in phases}
    longest = max(records, key=lambda record: record["phases"].get("calls", 0.0))
    return {
        "all": round(sum(record["seconds"] for record in records), 1),
        **total,
        "longest_calls": {"seconds": longest["phases"].get("calls", 0.0), "case": longest["case"]},
    }


def _worst(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By rule the largest share of the budget that a passed case used, and the case."""
    passed = [record for record in records if record["status"] == "pass" and record["used"]]
    rules = sorted({rule for record in passed for rule in record["used"]})
    worst = {rule: max(passed, key=lambda record: record["used"].get(rule, 0.0)) for rule in rules}
    return {rule: {"share": round(record["used"][rule], 4), "case": record["case"]} for rule, record in worst.items()}


def main() -> None:
    """Write the certificates of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder with report.json and journal.jsonl")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "certificates" / "h200")
    parser.add_argument("--date", type=datetime.date.fromisoformat, required=True)
    parser.add_argument("--label", default="", help="tells several runs of one backend apart, for example a version")
    parser.add_argument("--fact", action="append", default=[], metavar="NAME=VALUE", help="joins the environment")
    options = parser.parse_args()
    facts = dict(fact.split("=", 1) for fact in options.fact)
    options.into.mkdir(parents=True, exist_ok=True)
    for name, content in certificates(options.run, str(options.date), facts).items():
        stem = "-".join(part for part in (name.replace("[", "-").rstrip("]"), options.label) if part)
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (options.into / f"{stem}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
