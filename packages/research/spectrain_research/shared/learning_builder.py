"""A mark of tree builders that learn from verified trees."""


class LearnsFromTrees:
    """A builder that learns from the trees that were verified, so others mislead it."""
