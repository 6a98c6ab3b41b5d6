"""Measurements of this project against its goals. They run from a clone and are not part of the
installed package.

`python -m benchmarks.NAME key=value ..` runs one; `python -m benchmarks.NAME --help` lists its
settings.
"""
