"""The conformance suite: one test per capability, each reading case → run → judge; run it with ``pytest --pyargs``.

Imports from: cases, problems, judging, trials.
"""
