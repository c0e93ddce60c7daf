"""``python -m mla_conformance``: the command line in an environment that has no script of it."""

from mla_conformance.cli import command

command()
