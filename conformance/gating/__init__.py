"""Whether a run may be merged: the gate, its table and the must-pass lists.

Imports from: files, cases, judging, vocabulary, report, expectations.
"""
