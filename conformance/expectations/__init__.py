"""Expectations: known failures with reasons, outside the tests, that expire and must not turn out wrong.

Imports from: files, cases, judging, vocabulary, report.
"""
