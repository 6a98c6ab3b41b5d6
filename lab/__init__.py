"""The laboratory: benchmarks, what they measured (results/), and the pages that show it. It runs
from a clone and is not part of the installed package.
"""
