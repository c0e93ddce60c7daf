"""What a failure tells: which known defect or common mistake it looks like, and a map of where its errors are.

Imports from: cases, vocabulary, judging, problems, driving, roles, trials, defects.
"""
