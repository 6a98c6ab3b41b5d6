"""The drafter of Qwen2.5-Coder-1.5B that ships: prompts, answers, training and scores."""
