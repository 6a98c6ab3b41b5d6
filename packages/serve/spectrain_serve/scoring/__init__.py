"""Scoring of a running server: its answers, its counters and its times."""
