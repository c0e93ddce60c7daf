"""The commands that decide by a run's outcome: gate, expectations update, verify, mustpass."""

import argparse
import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_conformance.files.inputs import InputError
from mla_conformance.report.commands import drift
from mla_conformance.report.terminal import say

if TYPE_CHECKING:
    from mla_conformance.expectations.apply import Expectations
    from mla_conformance.running.certify import Run

_SHIPPED = "shipped"


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    _add_gate(commands)
    expectations = commands.add_parser("expectations", help="known failures with reasons").add_subparsers(required=True)
    update = expectations.add_parser("update", help="rewrite a folder of expectations from what a report found")
    update.add_argument("report", type=Path, metavar="REPORT")
    update.add_argument("--dir", type=Path, required=True, metavar="DIR")
    update.set_defaults(run=_update)
    verify = commands.add_parser("verify", help="check a certificate's form, digests and arithmetic")
    verify.add_argument("certificate", type=Path, metavar="FILE")
    verify.add_argument("--rerun", type=int, default=0, metavar="K", help="also run K random cases of it again")
    verify.add_argument("--backend", metavar="NAME|module:Class|file.py:Class", help="what to run again")
    verify.add_argument("--device", metavar="cpu|cuda")
    verify.set_defaults(run=_verify)
    mustpass = commands.add_parser("mustpass", help="print the must-pass list of this suite version")
    mustpass.set_defaults(run=_mustpass)


def _add_gate(commands: Any) -> None:
    gate = commands.add_parser("gate", help="decide by reports whether a change may be merged")
    gate.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    gate.add_argument("--baseline", type=Path, action="append", default=[], metavar="REPORT", help="of an earlier run")
    gate.add_argument("--expectations", type=Path, action="append", default=[], metavar="DIR")
    gate.add_argument("--must-pass", nargs="?", const=_SHIPPED, metavar="FILE", help="by default the suite's own list")
    gate.add_argument("--max-drift", type=drift, metavar="SHARE", help="close on a larger growth in error-budget use")
    gate.set_defaults(run=_gate)


def add_certify_options(certify: argparse.ArgumentParser) -> None:
    """Add the options by which a run leads to a certificate."""
    certify.add_argument("--expectations", type=Path, action="append", default=[], metavar="DIR")
    certify.add_argument("--certificate", type=Path, metavar="FILE", help="certify a complete run of one backend")


def load_expectations(folders: list[Path]) -> "Expectations":
    """The shipped expectations and those of ``folders``, which must be up to date.

    Raises:
        InputError: a file is malformed, or an entry of ``folders`` is stale or expired.
    """
    from mla_conformance.expectations.apply import Expectations, shipped

    for entry, problem in Expectations.load(folders).problems():
        raise InputError(f"{entry.file}: entry {entry.number}: {problem}")
    return Expectations.load([shipped(), *folders])


def certifiable(run: "Run") -> bool:
    """Whether a run that is asked for can be certified; says why not."""
    from mla_conformance.certificate.issue import Refused, require_certifiable
    from mla_conformance.running.certify import facts_of

    try:
        require_certifiable(
            [facts_of(subject) for subject in run.selection.subjects], run.cases, run.selection.explore, run.extra
        )
    except Refused as reason:
        say(f"mla-conformance: no certificate: {reason}", error=True)
        return False
    return True


def write_certificate(options: argparse.Namespace, run: "Run") -> int:
    """Write the certificate of a finished run; the exit status."""
    from mla_conformance.certificate.issue import Refused, issue
    from mla_conformance.files.outputs import write_output
    from mla_conformance.report.json_report import to_text

    try:
        certificate = issue(run.summary(), datetime.date.today())
    except Refused as reason:
        say(f"mla-conformance: no certificate: {reason}", error=True)
        return 1
    write_output(options.certificate, to_text(certificate.to_json()))
    say(f"wrote {options.certificate}", error=True)
    return 0


def _gate(options: argparse.Namespace) -> int:
    from mla_conformance.expectations.apply import Expectations, shipped
    from mla_conformance.gating.gate import Gate
    from mla_conformance.gating.gate_table import gate_lines
    from mla_conformance.gating.mustpass import MustPass
    from mla_conformance.report.loading import load_report

    must_pass = None
    if options.must_pass:
        must_pass = MustPass.of_suite() if options.must_pass == _SHIPPED else MustPass.read(Path(options.must_pass))
    gate = Gate(
        reports=[load_report(path) for path in options.reports],
        expectations=Expectations.load([shipped(), *options.expectations]),
        baseline=[load_report(path) for path in options.baseline],
        must_pass=must_pass,
        max_drift=options.max_drift,
    )
    rows = gate.rows()
    blocked = any(map(gate.blocks, rows))
    for line in gate_lines(rows, blocked, sum(len(report.records) for report in gate.reports)):
        say(line)
    return 1 if blocked else 0


def _update(options: argparse.Namespace) -> int:
    from mla_conformance.expectations.update import plan_update
    from mla_conformance.report.loading import load_report

    update = plan_update(load_report(options.report), options.dir)
    update.write(options.dir)
    for sign, entries in (("+", update.added), ("-", update.removed)):
        for entry in entries:
            say(f"{sign} {entry.backend} {entry.case} {entry.status} {entry.check}".rstrip())
    say(f"{len(update.added)} added, {len(update.removed)} removed, {len(update.kept)} kept in {options.dir}")
    without = sum(not entry.reason.strip() for entry in (*update.kept, *update.added))
    if without:
        say(f"{without} entries need a reason; the gate refuses them until they have one")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from mla_conformance.certificate.certificate import read_certificate
    from mla_conformance.certificate.rerun import rerun
    from mla_conformance.certificate.verify import problems

    certificate = read_certificate(options.certificate)
    found = problems(certificate, datetime.date.today())
    if not found and options.rerun > 0:
        found = list(rerun(certificate, options.rerun, options.backend, options.device))
    for problem in found:
        say(f"{options.certificate}: {problem}", error=True)
    if found:
        return 1
    counts, again = certificate.counts, f" · {options.rerun} run again" if options.rerun > 0 else ""
    dirty = "" if certificate.clean_tree is not False else " · from a changed checkout"
    subject = f"{certificate.backend} on {certificate.device}, suite {certificate.suite}"
    say(f"{options.certificate}: {subject}: {counts.passed} of {counts.listed} passed · holds{again}{dirty}")
    return 0


def _mustpass(options: argparse.Namespace) -> int:
    from mla_conformance.gating.mustpass import MustPass

    say(MustPass.of_vocabulary().to_text().rstrip("\n"))
    return 0
