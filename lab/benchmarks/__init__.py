"""Measurements of this project against its goals. They run from a clone and are not part of the
installed package.

`python -m lab.benchmarks.NAME key=value ..` runs one; `python -m lab.benchmarks.NAME --help` lists
its settings.
"""
