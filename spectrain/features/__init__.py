"""What crosses from the target to a drafter, and where it comes from."""
