"""Indexer: scores of cached tokens, and the best of them."""
