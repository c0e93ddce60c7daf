"""How fast a right kernel is: shapes that are timed, times as data and in words, and what takes them.

Imports from: cases, driving, problems, roles, trials.
"""
