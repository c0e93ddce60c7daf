"""Kernels that cheat: what each attempts, and what catches it or why nothing does.

A cheat is one small class. What it computes is wrong, or not its own; it is certified as a kernel of a user's is.

Imports from: files, cases, driving, judging, roles, trials, expectations, gating, engine.
"""
