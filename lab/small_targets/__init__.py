"""Small targets of many kinds, which tests and measurements train in minutes."""
