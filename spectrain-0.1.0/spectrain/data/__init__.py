"""Conversations as token batches: reading, chat templates, loss masks."""
