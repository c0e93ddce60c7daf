"""The backend under test, what it supports, and the driver that runs a problem on it and observes what comes back.

Imports from: files, problems.
"""
