"""The golden result, the judge that compares, its verdict and the record of it.

Imports from: files, cases, problems, driving.
"""
