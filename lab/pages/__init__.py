"""The pages of docs/ that show measured results."""
