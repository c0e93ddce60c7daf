"""Cases, plain data without tensors: their form, the capabilities they decide, the lists, and how others are drawn.

Imports from: files.
"""
