"""Modules, losses and rollouts that several families share."""
