"""mla-conformance: decides whether a Multi-head Latent Attention kernel is right.

The way through it: case → problem → reference and backend → judge → verdict → record → report.
"""

from mla_conformance import roles
from mla_conformance.version import __version__

__all__ = ["__version__", "roles"]  # a case is known by the class that its role's room holds
