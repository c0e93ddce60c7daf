"""The scoreboard: submitted records of many kernels as a static site, and as files for other programs.

Imports from: files, cases, judging, models, report, certificate.
"""
