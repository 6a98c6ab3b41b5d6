"""Ideas of the literature on speculative decoding that no engine serves, one folder each, for
the core in `spectrain`.
"""
