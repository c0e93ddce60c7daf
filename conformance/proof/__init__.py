"""The golden layer held against transformers' modules, and authors' own code; the one room that imports transformers.

Imports from no other room.
"""
