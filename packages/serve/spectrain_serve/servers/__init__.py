"""Programs that run the target and answer over HTTP, such as vLLM: their contract, a file per
engine, and the client.
"""
