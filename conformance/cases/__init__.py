"""Cases, plain data without tensors: their form, the capabilities they decide, the lists, and how others are drawn.

Imports from: files.
"""

from mla_conformance.cases import decode, indexer, layer, prefill, sparse

__all__ = ["decode", "indexer", "layer", "prefill", "sparse"]  # a role is known by the module that holds its cases
