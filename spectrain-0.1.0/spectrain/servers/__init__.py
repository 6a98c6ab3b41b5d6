"""Programs that run the target and answer over HTTP, such as vLLM."""
