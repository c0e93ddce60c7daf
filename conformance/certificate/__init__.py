"""Certificates: a complete run of one backend as a file whose form, digests and arithmetic anyone can check.

Imports from: files, cases, driving, judging, vocabulary, traits, speed, report, gating.
"""
