"""Models: what a published configuration says of a model's attention, and the cases of one that is deployed.

Imports from: files, cases.
"""
