"""Version of the distribution, read by the build."""

__version__ = "2026.11.0"
SUITE_VERSION = ".".join(__version__.split(".")[:2])
"""Version of the case list and of what a verdict means."""
