"""The target: an unmodified Hugging Face causal LM, and what it is run with."""
