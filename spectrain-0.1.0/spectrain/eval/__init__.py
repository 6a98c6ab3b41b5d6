"""Measure drafters by really decoding."""
