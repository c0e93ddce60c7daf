"""The commands as a person gives them and what they print; `cli` puts them together.

Imports from: files, cases, judging, isolation, report, expectations, gating, running, certificate.
"""
