"""The commands as a person gives them and what they print; `cli` puts them together.

Imports from: files, proof, cases, judging, vocabulary, models, trials, report, defects, expectations, export, gating,
engine, certificate, bump, cheats, bench, scoreboard.
"""
