"""The parsers of ``backends``, ``capabilities``, ``models``, ``defects``, ``cheats`` and ``bench``."""

import argparse
from pathlib import Path
from typing import Any

from mla_conformance.commands.options import DEVICE, REFERENCE, TIERS


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    backends = commands.add_parser("backends", help="list the backends, and why one cannot run here")
    backends.add_argument("--device", metavar=DEVICE)
    backends.set_defaults(run=_backends)
    capabilities = commands.add_parser("capabilities", help="list the capabilities with their definitions")
    capabilities.add_argument(
        "--spec",
        type=Path,
        metavar="FILE",
        help="only write the hazards between this file's markers",
    )
    told = "instead, the pairs of values that its declared support leaves unreached"
    capabilities.add_argument("--backend", metavar=REFERENCE, help=told)
    capabilities.add_argument("--device", metavar=DEVICE, help="of --backend")
    capabilities.set_defaults(run=_capabilities)
    models = commands.add_parser("models", help="list the models that certify --model knows, or all of one")
    models.add_argument("name", nargs="?", metavar="NAME")
    models.add_argument("--proof", action="store_true", help="instead, hold the golden layer against their own code")
    models.add_argument("--docs", type=Path, metavar="FILE", help="of --proof: rewrite the tables between its markers")
    models.set_defaults(run=_models)
    defects = commands.add_parser("defects", help="judge the judge: known wrong kernels and honest ones")
    defects.add_argument("--tier", default="full", metavar=TIERS)
    defects.add_argument("--out", type=Path, metavar="FILE", help="also write the outcome as JSON")
    defects.add_argument("--page", type=Path, metavar="FILE", help="rewrite the section between this file's markers")
    defects.set_defaults(run=_defects)
    cheats = commands.add_parser("cheats", help="kernels that cheat, and what catches them")
    cheats.add_argument("--out", type=Path, metavar="FILE", help="also write the outcome as JSON")
    cheats.add_argument("--table", type=Path, metavar="FILE", help="rewrite the section between this file's markers")
    cheats.set_defaults(run=_cheats)
    bench = commands.add_parser("bench", help="time and memory of the golden pass and of the suite, as ratios")
    bench.add_argument("--device", metavar=DEVICE)
    bench.add_argument("--scale", action="store_true", help="the golden pass over contexts and numbers of heads")
    bench.add_argument("--sparse", action="store_true", help="the golden sparse pass beside a dense one with a mask")
    bench.add_argument("--kernels", action="store_true", help="throughput of the backends that can run here")
    bench.add_argument("--suite", metavar="NAME", help="where the time of a run on this backend goes")
    bench.add_argument(
        "--runs", nargs="+", metavar=REFERENCE, help="runs of each backend, of all, and of all on one GPU or worker"
    )
    bench.add_argument("--apart", action="store_true", help="of --runs: all of them once more, judged apart")
    bench.add_argument("--tier", default="smoke", metavar=TIERS, help="of --suite and --runs")
    bench.add_argument("--capability", action="append", default=[], metavar="NAME", help="of --runs; by default all")
    bench.add_argument("--case", action="append", default=[], metavar="ID", help="of --suite: this case, not a tier")
    bench.set_defaults(run=_bench)


def _backends(options: argparse.Namespace) -> int:
    from mla_conformance.commands.tell import tell_backends

    return tell_backends(options)


def _capabilities(options: argparse.Namespace) -> int:
    if options.spec:
        from mla_conformance.commands.hazards import write_hazards

        return write_hazards(options.spec)
    if options.backend is not None:
        from mla_conformance.commands.unreached import tell_unreached

        return tell_unreached(options.backend, options.device)
    from mla_conformance.commands.tell import tell_capabilities

    return tell_capabilities(options)


def _models(options: argparse.Namespace) -> int:
    if options.proof:
        from mla_conformance.commands.proof import prove

        return prove(options.docs)
    from mla_conformance.commands.models import tell_models

    return tell_models(options)


def _defects(options: argparse.Namespace) -> int:
    from mla_conformance.commands.defects import run_defects

    return run_defects(options)


def _cheats(options: argparse.Namespace) -> int:
    from mla_conformance.commands.cheats import try_cheats

    return try_cheats(options)


def _bench(options: argparse.Namespace) -> int:
    from mla_conformance.commands.bench import run_bench

    return run_bench(options)
