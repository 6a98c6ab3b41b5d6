"""The form of stored texts that drafters copy from."""

TEXT_END = -1
"""The token between two texts of a store, and after the end of one."""
MAX_MATCH = 16
"""Last tokens of a text that are searched in a store at most; its suffixes are sorted by so many
tokens.
"""
