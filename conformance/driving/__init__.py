"""The driver that runs a problem on a backend and observes what comes back, here or in a process of the kernel's own.

Imports from: files, problems.
"""
