"""Files that commands read and write: whole, or refused with their name.

Imports from no other room.
"""
