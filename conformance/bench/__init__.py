"""What the golden pass, the suite and the judged kernels cost; ratios within one run, medians with their spread.

Imports from: cases, problems, judging, roles, trials, report, engine.
"""
