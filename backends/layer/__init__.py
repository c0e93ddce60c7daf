"""The common MLA layer: cache, metadata and its builder, weights, and the class that puts prefill and decode together.

Imports from no other room.
"""
