"""Judging the judge: known wrong kernels and honest ones.

A known defect is one small class that overrides one step of the honest EAGER kernel.

Imports from: files, cases, driving, judging, vocabulary, trials.
"""
