"""Studies around a training in `spectrain`: what it needs, what its data holds, and
which drafter is best."""
