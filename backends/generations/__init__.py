"""The other generations of the prefill interface, and vLLM's own classes: each driven as one of ours.

Imports from: layer.
"""
