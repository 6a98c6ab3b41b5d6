"""One file per family of drafters."""
