"""The commands as a person gives them and what they print; `cli` puts them together.

Imports from: files, cases, judging, vocabulary, models, trials, traits, defects, diagnosis, report,
expectations, export, engine, gating, bump, certificate, scoreboard.
"""
