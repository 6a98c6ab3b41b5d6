"""Drafters in other projects' layouts: a table of them (layouts.py), families and containers, the
converter, the linter, the model card, the upload.
"""
