"""The golden layer held against the attention modules of Hugging Face's transformers, the one room that imports it.

Imports from no other room.
"""
