"""What pages show: help of commands, fields of case ids, inputs of functions, and of each kernel the newest record.

``python ci/pages.py`` writes it. A figure of a record stands below the suite that judged it, on what device, and when.
"""

import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from unittest.mock import patch

import torch
from msgspec import structs

from mla_conformance.api.own_forms import FORMS, IN_WORDS
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import CLASSES, Call, Case
from mla_conformance.certificate.certificate import Certificate
from mla_conformance.certificate.records import read_records
from mla_conformance.commands.parser import command_line, commands_of
from mla_conformance.commands.table import COMMANDS, GROUPS
from mla_conformance.files.whole import InputError, write_section
from mla_conformance.report.causes import grouped
from mla_conformance.scoreboard.board import Board, Entry

ROOT = Path(__file__).parents[1]
TABLES = tomllib.loads((ROOT / "ci" / "functions.toml").read_text(encoding="utf-8"))
_NOISE = re.compile(
    r"\Ausage: [\s\S]*?\n\n|^(positional arguments|options):\n|^  -h, --help .*\n|^examples:\n(  .*\n)+\n"
    r"|^exit status: 0 (done|written|rewritten); 2 usage$",
    re.MULTILINE,
)
"""Usage, which repeats the options, headings, the option that every command has, examples, and a usual exit status."""
_ENTRY = re.compile(r"^  (-\S.*|CASE_ID.*)\n(?:   .*\n)*", re.MULTILINE)
_REST = re.compile("; |, (?:so that|such as|whose) ")  # where a reason goes into details
_ROLES = tuple(dict.fromkeys(CLASSES[call] for call in Call))


def commands() -> str:
    """Each command's help without what stands word for word in that of an earlier one: entries, exit status."""
    with patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}):
        parsers = commands_of(command_line(COMMANDS, GROUPS))
        texts = [(name, _NOISE.sub("", parser.format_help()).strip("\n")) for name, parser in parsers]
    seen, known, statuses, sections = set[str](), list[str](), dict[str, str](), []

    def entry(found: re.Match[str]) -> str:
        name, words = found[0].split()[0].rstrip(","), " ".join(found[0].split())
        if words in seen:
            known.append(name)
            return ""
        seen.add(words)
        return found[0]

    for command, text in texts:
        known.clear()
        text = re.sub(r"\n{3,}", "\n\n", _ENTRY.sub(entry, f"{text}\n")).strip("\n")
        text, exit_status, after = text.partition("exit status: ")
        above = "\n".join(wrap(f"as above: {', '.join(known)}", 80)) if known else ""
        first = statuses.setdefault(after, command)
        after = after if first == command else f"that of {first}"
        body = "\n\n".join(filter(None, (text.strip("\n"), above, exit_status + after if exit_status else "")))
        sections.append(f"## {command}\n\n```text\n{body}\n```")
    return "\n\n".join(sections)


def case_fields() -> str:
    """Fields with their defaults: those that all cases have, those over a cache, and each role's own."""
    common, cached = ({field.name for field in fields(case)} for case in (Case, CachedCase))
    over = ", ".join(case.role for case in _ROLES if issubclass(case, CachedCase))
    lists: list[tuple[str, type[Case], set[str]]] = [("All cases", Case, set())]
    lists += [(f"Over a cache: {over}", CachedCase, common)]
    for case in _ROLES:
        lists.append((f"The role {case.role}", case, common | cached if issubclass(case, CachedCase) else common))
    parts = []
    for title, case, told in lists:
        bases = [base for base in case.__mro__[1:] if issubclass(base, Case)]
        usual = {field.name: field.default for base in bases for field in fields(base)}
        entries, others = [], []
        for field in fields(case):
            plain = int(field.default) if isinstance(field.default, bool) else field.default
            default = f"={plain}" if isinstance(plain, int | str) and plain != "" else ""  # none where an id says it
            if field.name not in told:
                entries.append(f"- `{field.name}{default}`: {field.metadata['means']}")
            elif field.default != usual[field.name]:
                others.append(f"`{field.name}{default}`")
        if entries:
            entries += [f"- Other defaults in this role: {', '.join(others)}"] if others else []
            parts.append("\n".join([f"### {title}", "", *entries]))
    return "\n\n".join(parts)


def newest(records: list[Certificate]) -> list[Certificate]:
    """The newest of each kernel, and those of its suite in other versions or on other devices, which say so."""
    found = []
    for entries in Board(tuple(Entry(record, "") for record in records), (), ()).by_kernel.values():
        first, *others = (entry.record for entry in entries)
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
        rows = [f"{place}:", ""]
        for record in group:
            name, version = next(iter(record.distributions.items()))
            noted = record.counts.noted(waived="known", unavailable="lacked memory")
            judged = f"{record.counts.passed}/{record.counts.listed}"
            rows.append(f"- {record.backend}, {name} {version}: {', '.join([judged, *noted])}")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def failures(records: list[Certificate]) -> str:
    """A line for each reason why kernels fail, the first part of it, with the shortest of the cases that show it."""
    found = ((record.backend, finding) for record in records for finding in record.findings)
    groups = grouped(found, lambda each: _REST.split(each[1].expectation.partition(": ")[2].removeprefix("bug: "))[0])
    rows = []
    for reason, group in groups.items():
        kernels = Counter(backend for backend, _ in group)
        example = min((finding.case for _, finding in group), key=lambda case: (len(case), case))
        told = ", ".join(f"{backend} {number}" for backend, number in kernels.items())
        rows.append(f"- {told}: {reason}: `{example}`")
    return "\n".join(rows)


def table_of(role: str) -> str:
    """A table as a page shows it; inputs of which the same is said share a row."""
    rows = []
    for name, words in TABLES[role]["inputs"].items():
        says, when = (words, "") if isinstance(words, str) else words
        if (form := FORMS[role].get(name)) and (role, name) not in IN_WORDS:
            dtype = f" {form.dtype}".replace("torch.", "") if isinstance(form.dtype, torch.dtype) else ""
            shape = f"[{form.shape}]" if form.shape else "scalar"
            says = f"{shape}{dtype}{says and ', '}{says}"
        rows.append((name, says, when))
    lines = ["| input | what | when |", "|---|---|---|"]
    for (says, when), same in groupby(rows, lambda row: row[1:]):
        names = ", ".join(f"`{name}`" for name, *_ in same)
        lines.append(f"| {names} | {says} | {when} |".replace("  |", " |"))
    lines += [f"| *returns* `{name}` | {what} | |" for name, what in TABLES[role]["returns"].items()]
    return "\n".join(lines)


def sections(root: Path) -> Iterator[tuple[Path, str, str]]:
    yield root / "docs" / "commands.md", "commands", commands()
    yield root / "docs" / "case-ids.md", "fields", case_fields()
    api, functions = root / "docs" / "python-api.md", root / "docs" / "examples" / "functions.py"
    for name in TABLES:
        yield api, name, table_of(name)
    code = functions.read_text(encoding="utf-8").partition("\n\n")[2]  # what stands below its docstring
    yield api, "functions", f"```python\n{code}```"
    files = sorted((root / "fixtures" / "records").glob("*.jsonl"))
    records = []
    for line in (line for path in files for line in read_records(path)):
        if line.kept is None:  # a page would leave it out unseen
            raise InputError(line.why)
        records.append(line.kept.certificate)
    shown = newest(records)
    for name, content in (("h200", kernels(shown)), ("failures", failures(shown))):
        yield root / "docs" / "findings.md", name, content


if __name__ == "__main__":
    try:
        for section in sections(ROOT):
            write_section(*section)
    except InputError as error:
        sys.exit(str(error))
