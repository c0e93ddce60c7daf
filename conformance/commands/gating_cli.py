"""The parsers of the commands that decide by a run's outcome: gate, expectations update, verify, mustpass."""

import argparse
from pathlib import Path
from typing import Any

from mla_conformance.commands.options import DEVICE, REFERENCE, TIERS
from mla_conformance.report.commands import drift


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    _add_gate(commands)
    expectations = commands.add_parser("expectations", help="known failures with reasons").add_subparsers(required=True)
    update = expectations.add_parser("update", help="rewrite a folder of expectations from what a report found")
    update.add_argument("report", type=Path, metavar="REPORT")
    update.add_argument("--dir", type=Path, required=True, metavar="DIR")
    update.set_defaults(run=_update)
    _add_verify(commands)
    mustpass = commands.add_parser("mustpass", help="print the must-pass list of this suite version")
    mustpass.set_defaults(run=_mustpass)


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser("verify", help="check certificates and submissions, and what of them is here")
    verify.add_argument("certificates", type=Path, nargs="+", metavar="FILE|DIR")
    verify.add_argument(
        "--rerun", type=int, default=0, metavar="K", help="also run K random judged cases of each again"
    )
    verify.add_argument("--backend", metavar=REFERENCE, help="what to run again")
    verify.add_argument("--device", metavar=DEVICE)
    verify.add_argument("--salt", metavar="TEXT", help="what their inputs are drawn with, by default something new")
    verify.add_argument("--signature", action="store_true", help="each has to be signed by one of the --signers")
    verify.add_argument("--signers", type=Path, metavar="FILE", help="allowed signers, as ssh-keygen describes them")
    verify.set_defaults(run=_verify)


def _add_gate(commands: Any) -> None:
    gate = commands.add_parser("gate", help="decide by reports whether a change may be merged")
    gate.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    gate.add_argument("--baseline", type=Path, action="append", default=[], metavar="REPORT", help="of an earlier run")
    gate.add_argument("--expectations", type=Path, action="append", default=[], metavar="DIR")
    gate.add_argument(
        "--require", nargs="+", action="extend", default=[], metavar=REFERENCE, help="backends that have to be judged"
    )
    gate.add_argument(
        "--require-tier", default="full", metavar=f"{TIERS}|none", help="of which every case needs a verdict, full"
    )
    gate.add_argument(
        "--must-pass",
        nargs="*",
        metavar="FILE|NAME[@VERSION]",
        help="what has to be passed: by default shipped, the suite's own list; or profiles of it, which then bind",
    )
    gate.add_argument("--max-drift", type=drift, metavar="SHARE", help="close on a larger growth in error-budget use")
    gate.set_defaults(run=_gate)


def _gate(options: argparse.Namespace) -> int:
    from mla_conformance.commands.gating import gate

    return gate(options)


def _update(options: argparse.Namespace) -> int:
    from mla_conformance.commands.gating import update_expectations

    return update_expectations(options)


def _verify(options: argparse.Namespace) -> int:
    from mla_conformance.commands.verify import verify

    return verify(options)


def _mustpass(options: argparse.Namespace) -> int:
    from mla_conformance.commands.gating import tell_must_pass

    return tell_must_pass()
