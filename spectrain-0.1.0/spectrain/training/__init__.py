"""The training loop. It knows no family."""
