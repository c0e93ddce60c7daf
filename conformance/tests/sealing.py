"""Journals that stand as a run leaves them that is ended behind a line."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mla_conformance.engine.journal import JOURNAL_NAME, Journal


def write_sealed(folder: Path, lines: Iterable[str]) -> None:
    """Write a journal of these lines, whatever they follow where they come from, with its seal."""
    journal = Journal(folder / JOURNAL_NAME)
    journal.path.unlink(missing_ok=True)
    for line in lines:
        event: Any = json.loads(line)
        del event["after"]
        journal.append(event)
