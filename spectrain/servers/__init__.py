"""Engines as model cards and plans name them: their commands, and what is known of them."""
