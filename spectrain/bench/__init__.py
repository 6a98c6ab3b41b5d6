"""`spectrain bench`: what a user measures on her own machine. The project's own measurements are
in lab/benchmarks/.
"""
