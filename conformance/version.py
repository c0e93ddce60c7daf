"""Version of the distribution, read by the build."""

__version__ = "2026.1.0"
