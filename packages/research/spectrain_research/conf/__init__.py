"""The choices and recipes of the ideas, which hydra finds by the entry point `spectrain.conf`."""
