"""Compiled kernels of x86 processors for spectrain. `engine` and `operations` are what the core
finds by the entry points of this package.
"""
