"""Drafters in other projects' layouts: one file per layout, the converter, the linter, the model
card, the upload.
"""
