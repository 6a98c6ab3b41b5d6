"""Features of the target: batches, and the sources that compute, store and read them."""
