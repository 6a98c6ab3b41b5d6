"""Folders of scores that nothing decoded, for comparisons of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PROMPTS = 10


def write_score(
    run: Path,
    name: str,
    plain: float,
    speedup: float,
    server: dict[str, Any] | None = None,
    **setting: Any,
) -> None:
    """Write the score of an engine that decodes so many tokens per second without the drafter,
    on prompts of 10 tokens.
    """
    folder = run / "eval" / name
    folder.mkdir(parents=True)
    rows = [
        {
            "system": "drafter",
            "id": str(number),
            "tokens": 10,
            "seconds": 10 / plain / speedup * (1 + number % 3 / 100),
            "autoregressive_tokens": 10,
            "autoregressive_seconds": 10 / plain,
        }
        for number in range(PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    shift = setting.pop("shift", 0)
    lines = [
        {"id": str(number), "turn": 0, "prompt_tokens": [number, shift]}
        for number in range(PROMPTS)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "acceptance_length": {"pooled": 1.6, "ci95": [1.5, 1.7]},
        "acceptance_by_depth": [0.5],
        "speedup": {"ratio": speedup, "ci95": [speedup - 0.1, speedup + 0.1], "predicted": None},
        "tokens_per_second": {"autoregressive": plain, "drafted": plain * speedup},
        "lossless": None,
        "label": "drafter, chain of 2",
        "tree": {"name": "chain", "depth": 2},
        "engine": "eager" if server is None else "server",
        "compared": {},
        "setting": {
            "target": "tiny",
            "drafter": {"choice": "eagle3"},
            "dtype": "float32" if server is None else "the server's",
            "threads": 2,
            "device": "cpu of this machine",
            "rule": "greedy",
            "batch_size": 1,
            "prompts": PROMPTS,
            "max_new_tokens": 11,
            "server": server,
            **setting,
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
