"""mla-conformance: decides whether a Multi-head Latent Attention kernel is right.

The way through the house: case → problem → reference and backend → judge → verdict → record → report.
"""

from mla_conformance.version import __version__

__all__ = ["__version__"]
