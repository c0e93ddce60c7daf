"""Trials: one subject on one case, and the procedures of the suite on streams, in graphs and around a layer.

Imports from: files, cases, problems, driving, judging, roles, vocabulary.
"""
