"""Length limits: as a model defines them, and as far as text in pieces gives the same result as text at once."""

from typing import Any

DEFAULT_MAX_LENGTH = 1 << 20  # for models without a limit, which only keep a state
TREE_SLOTS = 256  # slots for trees after a text


def max_text_length(config: Any) -> int:
    """Return the context length of a model in tokens, up to where pieces and text at once would differ.

    From a certain length on, longrope changes the rotation of all positions, cached keys included. From `floor_scale` on, Llama
    4's temperature grows with the slot of a token, which in a tree is not its position.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH)
    switch = find_rope_switch(config)
    if switch is not None:
        longest = min(longest, switch)
    if getattr(config, "attn_temperature_tuning", False):
        longest = min(longest, max(1, int(config.floor_scale) - TREE_SLOTS))
    return longest


def find_rope_switch(config: Any) -> int | None:
    """Return the position from which on all positions are rotated differently; None where this never happens."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = []
    for kind in (one for one in (rope, *rope.values()) if isinstance(one, dict)):
        if kind.get("rope_type") == "longrope":
            said = kind.get("original_max_position_embeddings"), getattr(config, "original_max_position_embeddings", None)
            found.append(next((size for size in said if size), config.max_position_embeddings))
        elif kind.get("rope_type") == "dynamic":
            found.append(config.max_position_embeddings)
    return min(found, default=None)
