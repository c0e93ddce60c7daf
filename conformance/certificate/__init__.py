"""Certificates: a complete run of one backend as a file whose form, digests and arithmetic anyone can check.

Imports from: files, cases, judging, report, gating, engine.
"""
