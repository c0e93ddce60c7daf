"""The commands as a person gives them and what they print; `cli` puts them together.

Imports from: files, cases, models, driving, judging, trials, defects, diagnosis, report, export, expectations, gating,
engine, certificate, cheats, bump, scoreboard, bench, proof.
"""
