"""Runs: what is judged, by which plan, in processes of its own, and how their records come back.

Imports from: cases, problems, driving, judging, isolation, report, trials, expectations, defects.
"""
