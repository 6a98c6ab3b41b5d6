"""Our engine beside the packages that a user could install instead."""
