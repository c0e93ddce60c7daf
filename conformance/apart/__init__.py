"""Kernel and judge in processes of their own, and what crosses between them.

Imports from: problems, driving, trials.
"""
