"""Axes of an evaluation: one drafter at several batch sizes, lengths of context or temperatures,
and under load.
"""
