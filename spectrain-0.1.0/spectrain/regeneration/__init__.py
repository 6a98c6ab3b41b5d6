"""Data whose answers the target generates."""
