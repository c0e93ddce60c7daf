"""The Python API: cases as tests of a plain function, its verdict as data, and golden results of one's own tensors.

Imports from: cases, diagnosis, driving, engine, files, judging, problems, report, roles, trials, vocabulary.
"""
