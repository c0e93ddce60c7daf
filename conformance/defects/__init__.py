"""Judging the judge: known wrong kernels and honest ones.

A known defect is one function: a step in which it differs from the honest EAGER kernel. What is wrong with each, and
what must find it, stands in ``known.toml``.

Imports from: files, cases, driving, judging, vocabulary, trials.
"""
