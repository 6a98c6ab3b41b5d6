"""Serving for the core in `spectrain`: starting engines, scoring servers, advice by engine times,
and following traffic.
"""
