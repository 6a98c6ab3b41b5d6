"""Length limits: as a model defines them, and as far as text in pieces gives the same result as
text at once.
"""

from typing import Any

DEFAULT_MAX_LENGTH = 1 << 20  # for models without a limit, which only keep a state
TREE_SLOTS = 256  # slots for trees after a text


def max_text_length(config: Any) -> int:
    """Return the context length of a model in tokens, up to where pieces and text at once would
    differ.

    From a certain length on, longrope changes the rotation of all positions, cached keys included.
    From `floor_scale` on, Llama 4's temperature grows with the slot of a token, which in a tree is
    not its position.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH)
    switch = find_rope_switch(config)
    if switch is not None:
        longest = min(longest, switch)
    if getattr(config, "attn_temperature_tuning", False):
        longest = min(longest, max(1, int(config.floor_scale) - TREE_SLOTS))
    return longest


def find_rope_switch(config: Any) -> int | None:
    """Return the position from which on all positions are rotated differently; None where this
    never happens.
    """
    switches = []
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            sizes = (
                rope.get("original_max_position_embeddings"),
                getattr(config, "original_max_position_embeddings", None),
            )
            switches.append(next((size for size in sizes if size), config.max_position_embeddings))
        elif rope.get("rope_type") == "dynamic":
            switches.append(config.max_position_embeddings)
    return min(switches, default=None)


def has_dynamic_rope(config: Any) -> bool:
    """Return whether the rotary embedding of a model depends on the length of the text."""
    return any(rope.get("rope_type") == "dynamic" for rope in _rope_parameters(config))


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of every rotary embedding of a model: of all layers, or by kind of
    layer.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict)]
