"""The commands as a person gives them and what they print; `cli` puts them together.

Imports from: files, cases, driving, judging, export, defects, report, expectations, gating, engine, certificate, bump,
scoreboard, bench, proof.
"""
