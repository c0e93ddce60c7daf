"""``cheats``: kernels that cheat, certified as a user would, and what catches them."""

import argparse

import msgspec

from mla_conformance.cheats.report import markdown, run_cheats, terminal_lines
from mla_conformance.files.outputs import Section
from mla_conformance.report.json_report import write_json
from mla_conformance.report.terminal import say


def try_cheats(options: argparse.Namespace) -> int:
    """Try them all, say and write what came of it; the exit status is 1 if one fares otherwise than expected."""
    table = Section.of(options.table, "cheats") if options.table else None  # known before anything is run
    report = run_cheats()
    if options.out:
        write_json(options.out, msgspec.to_builtins(report))
    if table:
        table.write(markdown(report))
    for line in terminal_lines(report):
        say(line)
    return 1 if report.unexpected else 0
