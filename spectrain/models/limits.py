"""How long a text may be: as a model says, and as far as it computes the same for a text in pieces as for the whole."""

from typing import Any

DEFAULT_MAX_LENGTH = 1 << 20  # of a model that names no length, for it keeps a state alone
TREE_SLOTS = 256  # slots that trees may take behind a text


def max_text_length(config: Any) -> int:
    """The context that a model was made for, in tokens, up to where pieces and the whole would differ.

    Longrope turns all positions otherwise from a certain length on, those of keys that lie in the cache as well. Llama 4's
    temperature grows with a token's slot, which in a tree is not its position, from `floor_scale` on.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH)
    switch = find_rope_switch(config)
    if switch is not None:
        longest = min(longest, switch)
    if getattr(config, "attn_temperature_tuning", False):
        longest = min(longest, max(1, int(config.floor_scale) - TREE_SLOTS))
    return longest


def find_rope_switch(config: Any) -> int | None:
    """The position from which on all positions are turned otherwise; None where they never are."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = []
    for kind in (one for one in (rope, *rope.values()) if isinstance(one, dict)):
        if kind.get("rope_type") == "longrope":
            said = kind.get("original_max_position_embeddings"), getattr(config, "original_max_position_embeddings", None)
            found.append(next((size for size in said if size), config.max_position_embeddings))
        elif kind.get("rope_type") == "dynamic":
            found.append(config.max_position_embeddings)
    return min(found, default=None)
