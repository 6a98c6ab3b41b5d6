"""What a schedule of draft tokens gains over a fixed number under simulated load, by the times that
`python -m lab.benchmarks.axes` measured.

    python -m lab.benchmarks.schedules

writes lab/results/schedules.json. It measures nothing itself.
"""

import json
from typing import Any

from lab.pages.render import ROOT
from spectrain.files import write_text
from spectrain_serve.times.load import LOADS, POLICIES, TimeTable, simulate_load
from spectrain_serve.times.schedule import simulate_schedule

RESULTS = ROOT / "lab" / "results"
# The rows of SmolLM2 whose drafting pays for one text, of chains of 3.
ROWS = ("shipped eagle3, chain of 3", "n-gram, chain of 3", "retrieval, chain of 3")
NUM_TOKENS = 3
BOUND_MS = 50.0


def read_table(entry: dict[str, Any]) -> TimeTable:
    """Return measured times, whose numbers of texts are text in a file."""
    parts: dict[str, Any] = {
        name: {int(size): value for size, value in part.items()} if isinstance(part, dict) else part
        for name, part in entry.items()
    }
    return TimeTable(**parts)


def simulate_row(table: TimeTable) -> dict[str, Any]:
    """Serve the same requests by the schedule, with a fixed number of draft tokens, and without
    drafts.
    """
    schedule = simulate_schedule(table, NUM_TOKENS, BOUND_MS)
    never = [
        simulate_load(table, POLICIES["never"], share * table.capacity(), BOUND_MS)
        for share in LOADS
    ]
    return {
        "ranges": schedule["ranges"],
        "over_fixed": schedule["gains"],
        "over_never": [
            round(plain.seconds_per_token / point["seconds_per_token"], 4)
            for plain, point in zip(never, schedule["scheduled"])
        ],
    }


def main() -> None:
    measured = json.loads((RESULTS / "axes.json").read_text())
    rows = {
        name: simulate_row(read_table(measured["rows"]["smollm2"][name]["batch"]["load"]["table"]))
        for name in ROWS
    }
    result = {
        "setting": {
            **{key: measured["setting"][key] for key in ("hardware", "versions", "date")},
            "command": "python -m lab.benchmarks.schedules",
        },
        "loads": LOADS,
        "num_tokens": NUM_TOKENS,
        "rows": rows,
    }
    write_text(RESULTS / "schedules.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
