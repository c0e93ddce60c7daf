"""Prefill: attention of new tokens to each other and to chunks of a context."""
