"""``scoreboard``: a site of records. Exit status 1 if a file was not taken for one; the site tells it as well."""

import argparse

from mla_conformance.report.terminal import say
from mla_conformance.scoreboard.board import Board
from mla_conformance.scoreboard.entry import read_entries
from mla_conformance.scoreboard.profiles import profiles
from mla_conformance.scoreboard.site import write_site


def scoreboard(options: argparse.Namespace) -> int:
    """Write the site; the exit status."""
    entries, refused = read_entries(options.records)
    board = Board(tuple(entries), tuple(refused), profiles())
    write_site(board, options.out)
    for each in board.refused:
        say(f"{each.path}: not shown: {each.why}", error=True)
    old = sum(bool(entry.old) for entry in entries)
    say(f"wrote {options.out / 'index.html'}: {len(entries)} records, {old} of them old, {len(refused)} not shown")
    return 1 if refused else 0
