"""A new version of a library beside the old one: each in an environment of its own, judged by one list, and compared.

Imports from: files, judging, speed, report, engine.
"""
