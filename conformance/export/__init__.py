"""Reproducers: one call of a backend as a script that needs torch and the backend's library, and nothing of ours.

Imports from: files, cases, problems, driving, judging, trials.
"""
