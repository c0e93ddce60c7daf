"""What a failure is handed on as: one call as a script that needs nothing of ours, its tensors, a map of its errors.

Imports from: files, cases, problems, driving, judging, roles, trials, diagnosis, report.
"""
