"""`spectrain bench`: what a machine can do, what the kernels and the engine make of it, and a report on both."""
