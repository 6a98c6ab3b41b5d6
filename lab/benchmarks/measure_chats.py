"""Cost of tokenizing and masking conversations: `python -m lab.benchmarks.measure_chats`. It prints
JSON.

It tokenizes embedded conversations with the templates of the tests, several times, and reports the
CPU seconds per thousand
conversations: the median, the smallest and the largest.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from spectrain.data.chat import tokenize_conversation
from spectrain.data.readers import load_embedded
from spectrain.models.loading import load_tiny

COUNT = 500
REPEATS = 5


def measure_seconds() -> list[float]:
    """Return the CPU seconds per thousand conversations of each repeat."""
    template = load_tiny(device="cpu").template
    conversations = load_embedded()[:COUNT]
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        for conversation in conversations:
            tokenize_conversation(template, conversation)
        seconds.append((time.process_time() - began) * 1000 / COUNT)
    return seconds


if __name__ == "__main__":
    measured = measure_seconds()
    result = {
        "cpu_seconds_per_1000": {
            "median": statistics.median(measured),
            "min": min(measured),
            "max": max(measured),
        }
    }
    text = (
        json.dumps(
            {**result, "conversations": COUNT, "repeats": REPEATS, "target": "tiny"}, indent=2
        )
        + "\n"
    )
    Path(sys.argv[1]).write_text(text) if len(sys.argv) > 1 else print(text, end="")
