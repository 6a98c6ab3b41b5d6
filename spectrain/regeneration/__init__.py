"""Data that the target itself writes."""
