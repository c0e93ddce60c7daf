"""Judging the judge: known wrong kernels, honest ones, and what a failure looks like.

A known defect is one small class that overrides one step of the honest EAGER kernel.

Imports from: files, cases, problems, driving, judging, roles, vocabulary, trials.
"""
