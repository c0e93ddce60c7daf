"""``cheats``: kernels that cheat, certified as a user would, and what catches them; they stand among the tests."""

import argparse
from importlib.resources import files

from mla_conformance.files.inputs import InputError


def try_cheats(options: argparse.Namespace) -> int:
    """Try them all, say and write what came of it; the exit status is 1 if one fares otherwise than expected.

    Raises:
        InputError: the tests are not here, as in what a wheel installs.
    """
    if not (files("mla_conformance") / "tests").is_dir():
        raise InputError(
            "cheats: they stand among the tests, which no wheel holds; run it where a checkout is installed: "
            "pip install -e ."
        )
    from mla_conformance.tests.cheats import report

    return report.try_cheats(options)
