"""The vocabulary: capabilities with the cases that decide them, tiers, and what SPEC says of the lists. No torch.

Imports from: files, cases, roles.
"""
