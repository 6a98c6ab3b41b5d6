"""Starting engines, and what a started engine is told while it runs."""
