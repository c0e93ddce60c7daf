"""How a run is carried out: its folder and journal, the supervisor, and the workers that it watches from outside.

Imports from: files, cases, models, problems, driving, apart, judging, trials, diagnosis, report,
expectations.
"""
