"""What the golden pass, the suite and the judged kernels cost; ratios within one run, medians with their spread.

Imports from: cases, judging, roles, trials, engine.
"""
