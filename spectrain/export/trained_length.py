"""What a drafter gives beyond the length of the texts that it was trained on, in a sentence for
notes and model cards.
"""

from collections.abc import Mapping
from typing import Any

Groups = Mapping[str, Mapping[str, Any]]
"""The entry by_text_position of a summary: a range of positions, as in 1k-2k -> its acceptance
length, rounds and tokens.
"""


DROP = 0.9
"""Share of the tokens per forward before the trained length, below which those beyond it call
for a remedy.
"""


def describe_trained_length(training: Mapping[str, Any] | None, groups: Groups) -> str | None:
    """Compare tokens per forward within the trained length and beyond, and name a remedy for a drop
    of a tenth; None where the length or a round beyond is missing."""
    trained = (training or {}).get("max_length")
    if trained is None:
        return None
    beyond = {name: group for name, group in groups.items() if range_start(name) >= trained}
    within = [group for name, group in groups.items() if name not in beyond]
    if not beyond:
        return None
    lengths = ", ".join(
        f"{group['acceptance_length']:.2f} in {name}" for name, group in beyond.items()
    )
    text = f"Trained on texts of up to {trained:,} tokens. Tokens per forward beyond: {lengths}"
    rounds = sum(group["rounds"] for group in within)
    if not rounds:
        return f"{text}."
    usual = sum(group["tokens"] for group in within) / rounds
    has_dropped = min(group["acceptance_length"] for group in beyond.values()) < DROP * usual
    remedy = (
        f" A drafter with attention of its own may do better with drafter.window={trained}."
        if has_dropped
        else ""
    )
    return f"{text}, against {usual:.2f} before.{remedy}"


def range_start(name: str) -> int:
    """Return the first position of a range, as in 1,024 for 1k-2k and 32,768 for 32k+."""
    start = name.partition("-")[0].rstrip("+")
    return int(start.rstrip("k")) * (1024 if start.endswith("k") else 1)
