"""What numbers alone do not show: bits that stay the same, errors as they are spread, races, what a sanitizer sees.

Imports from: cases, problems, driving, judging, roles, trials.
"""
