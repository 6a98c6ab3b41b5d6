"""The times of engines: measuring them, and what drafting can gain by them."""
