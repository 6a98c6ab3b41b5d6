"""Run folders, and what is done in them."""
