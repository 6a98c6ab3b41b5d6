"""Drafters that only copy, inside vLLM."""
