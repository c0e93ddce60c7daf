"""What a failure tells: which known defect or common mistake it looks like, and a map of where its errors are.

Imports from: cases, vocabulary, judging, problems, driving, roles, trials, defects.
"""

UNEXPLAINED = "MLA_CONFORMANCE_NO_EXPLAIN"
"""The variable of the environment with which a process of tests compares no failure with known mistakes."""
