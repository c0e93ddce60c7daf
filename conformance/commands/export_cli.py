"""The parser of ``export``: a failure as a script that needs nothing of ours."""

import argparse
from pathlib import Path
from typing import Any

from mla_conformance.commands.options import DEVICE, REFERENCE


def add_commands(commands: Any) -> None:
    """Add the parser of this command."""
    export = commands.add_parser("export", help="write one call as a script that needs torch and the library alone")
    export.add_argument("case", metavar="CASE_ID|FILE.json")
    export.add_argument("--backend", required=True, metavar=REFERENCE)
    export.add_argument("--device", metavar=DEVICE)
    export.add_argument("--out", type=Path, required=True, metavar="FILE.py", help="receives the script")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    from mla_conformance.commands.export import export

    return export(options)
