"""Roles, a folder for each: its cases, their lists and space (no torch), its problem and calls, and what judges it.

One value, of the role's name in capitals, says at the end of its ``problem.py`` what it is, as in ``definition.py``.

Imports from: cases, problems, driving, judging.
"""

from importlib import import_module

from mla_conformance.backends.roles import ROLES

for _role in sorted(ROLES):  # a call is known by the class of its cases, which a role's room holds
    import_module(f"{__name__}.{_role}.case")
