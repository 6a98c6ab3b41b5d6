"""What differs between targets, one file per kind; `detect.py` chooses the kind when a target is
loaded.
"""
