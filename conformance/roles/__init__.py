"""Roles, a folder for each: its cases, their lists and space (no torch), its problem and calls, and what judges it.

``role.py`` of a folder says in one value what the role is; ``table.py`` lists them.

Imports from: cases, problems, driving, judging.
"""

from importlib import import_module

from mla_conformance.backends.roles import Role

for _role in sorted(Role):  # a call is known by the class of its cases, which a role's room holds
    import_module(f"{__name__}.{_role}.case")
