"""Composed configurations, and the constructors that they name."""
