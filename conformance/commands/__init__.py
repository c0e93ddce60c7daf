"""The commands as a person gives them and what they print; `cli` puts them together.

Imports from: files, cases, models, driving, judging, trials, export, defects, report, expectations, gating, engine,
certificate, bump, scoreboard, bench, proof.
"""
