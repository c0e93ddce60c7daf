"""Reports: the outcome of a run as data, and views of it.

Imports from: files, cases, judging, vocabulary, models, diagnosis, speed.
"""
