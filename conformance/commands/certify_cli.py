"""The parser of ``certify``: a run of the suite, or the rest of an interrupted one."""

import argparse
from pathlib import Path
from typing import Any

from mla_conformance.commands.options import DEVICE, REFERENCE, TIERS, count, seconds


def add_commands(commands: Any) -> None:
    """Add the parser of this command."""
    certify = commands.add_parser("certify", help="judge backends")
    add_selection(certify)
    _add_part(certify)
    _add_folder(certify)
    certify.add_argument("--timeout", type=seconds, metavar="TIME", help="end a process whose case takes longer")
    certify.add_argument("--deadline", type=seconds, metavar="TIME", help="end the run after so long, as 40m")
    certify.add_argument(
        "--give-up-after",
        type=count,
        default=5,
        metavar="N",
        help="equal failures of a backend's process, 5",
    )
    _add_model(certify)
    certify.add_argument("-n", "--workers", type=count, metavar="N", help="processes that run cases")
    certify.add_argument(
        "--apart", action="store_true", help="inputs, kernel and judge in processes of their own, as for a certificate"
    )
    certify.add_argument("--json", action="store_true", help="print the report as JSON instead of text")
    certify.add_argument("--expectations", type=Path, action="append", default=[], metavar="DIR")
    issued = certify.add_mutually_exclusive_group()
    issued.add_argument("--certificate", type=Path, metavar="FILE", help="certify a complete run of one backend")
    issued.add_argument("--submission", type=Path, metavar="DIR", help="its record as a folder to hand in, below DIR")
    issued.add_argument(
        "--record", type=Path, metavar="FILE", help="the same for a kernel that lacks must-pass cases, which it tells"
    )
    certify.add_argument("--sign", type=Path, metavar="KEY", help="sign what is issued with an SSH key")
    certify.set_defaults(run=_certify)


def add_selection(command: argparse.ArgumentParser) -> None:
    """Add the options that say which backends a command judges by which cases."""
    command.add_argument("--backend", action="append", default=[], metavar=REFERENCE)
    command.add_argument("--capability", action="append", default=[], metavar="NAME")
    command.add_argument("--tier", metavar=TIERS, help="by default full")
    command.add_argument("--device", metavar=DEVICE)
    command.add_argument("--cases", type=Path, metavar="DIR", help="judge the case files of a folder instead")


def _add_part(certify: argparse.ArgumentParser) -> None:
    certify.add_argument(
        "--explore", type=int, metavar="N", help="judge N drawn cases as well; one that fails is made small"
    )
    certify.add_argument("--salt", metavar="TEXT", help="draw all inputs anew, those that this text stands for")
    certify.add_argument("--shard", metavar="I/N", help="judge one part of the cases; report merge joins the parts")
    certify.add_argument("--durations", type=Path, metavar="REPORT", help="balance the shards by an earlier run")


def _add_model(certify: argparse.ArgumentParser) -> None:
    which = certify.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="judge what a deployment of this model calls; see models")
    which.add_argument("--config", type=Path, metavar="PATH", help="the same of the model of this config.json")
    certify.add_argument("--tp", type=count, metavar="N", help="ranks that share the model's heads, 1")
    certify.add_argument("--kv-cache", metavar="NAME", help="what the model's cache is called, auto")


def _add_folder(certify: argparse.ArgumentParser) -> None:
    which = certify.add_mutually_exclusive_group()
    which.add_argument(
        "--out", type=Path, metavar="DIR", help="by default a new folder of build/mla-conformance, and latest beside it"
    )
    which.add_argument("--resume", type=Path, metavar="DIR", help="go on with the interrupted run of this folder")
    certify.add_argument(
        "--fresh", action="store_true", help="with --out: keep an unfinished run beside, and start another"
    )


def _certify(options: argparse.Namespace) -> int:
    from mla_conformance.commands.certify import certify

    return certify(options)
