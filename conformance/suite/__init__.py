"""The conformance suite: one parametrised test over the table of capabilities; run it with ``pytest --pyargs``.

Imports from: judging.
"""
