"""Train drafters for speculative decoding and prove what they gain."""
