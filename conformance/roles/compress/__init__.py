"""Compression: key states and gate scores of tokens to compressed entries, over several calls."""
