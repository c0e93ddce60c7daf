"""How a run is carried out: its folder and journal, the supervisor, and the workers that it watches from outside.

Imports from: files, cases, problems, driving, judging, vocabulary, models, trials, traits, speed,
diagnosis, report, expectations.
"""
