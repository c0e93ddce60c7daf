"""``cheats``: kernels that cheat, certified as a user would, and what catches them; they stand among the tests."""

import argparse

from mla_conformance.commands.options import require_tests


def try_cheats(options: argparse.Namespace) -> int:
    """Try them all, say and write what came of it; the exit status is 1 if one fares otherwise than expected.

    Raises:
        InputError: the tests are not here, as in what a wheel installs.
    """
    require_tests("cheats")
    from mla_conformance.tests.cheats import report

    return report.try_cheats(options)
