"""Recipes, finished runs and targets compared in one table."""
