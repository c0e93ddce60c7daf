"""Cases, plain data without tensors: what all roles have in common, how lists combine, and how others are drawn.

Imports from: files.
"""
