"""``defects`` and ``cheats``: the judge judged, by known wrong kernels, honest ones, and kernels that cheat."""

import argparse
from importlib.resources import files

from mla_conformance.defects.report import deciding_digest, markdown, run_matrix, summarise, terminal_lines
from mla_conformance.engine.machine import machine_cores
from mla_conformance.files.whole import InputError, Section, require_writable, write_output
from mla_conformance.report.json_report import to_text
from mla_conformance.report.terminal import say
from mla_conformance.vocabulary.capabilities import Tier


def run_defects(options: argparse.Namespace) -> int:
    tier = Tier(options.tier)
    page = Section.of(options.page, "defects") if options.page else None  # known before anything is run
    if options.out:
        require_writable(options.out)
    digest = deciding_digest()  # of what the run begins with; files may change while it lasts
    report = summarise(run_matrix(tier, machine_cores()), tier.value, digest)
    if options.out:
        write_output(options.out, to_text(report))
    if page:
        page.write(markdown(report))
    say(*terminal_lines(report))
    return 0 if report.holds else 1


def try_cheats(options: argparse.Namespace) -> int:
    """Certify kernels that cheat as a user would, say and write what catches them; 1 if one fares otherwise."""
    if not (files("mla_conformance") / "tests").is_dir():
        why = "needs a checkout, since no wheel holds the tests; clone the project and: pip install -e ."
        raise InputError(f"cheats: {why}")
    if options.out:
        require_writable(options.out)
    from mla_conformance.tests.cheats import report

    return report.try_cheats(options)
