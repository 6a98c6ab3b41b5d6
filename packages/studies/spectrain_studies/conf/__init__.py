"""Configurations of this package's commands, and its choices, which hydra finds by the entry point
`spectrain.conf`.
"""
