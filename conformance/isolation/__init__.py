"""What keeps a run alive beside a kernel that hangs, dies or takes everything: limits, watchdog, devices, journal.

Imports from: judging.
"""
