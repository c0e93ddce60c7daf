"""Judging the judge: known wrong kernels and honest ones.

A known defect is one function: a step in which it differs from the honest EAGER kernel.

Imports from: files, cases, driving, judging, vocabulary, trials.
"""
