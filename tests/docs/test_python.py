"""The page about the Python interface: its blocks run, in order, on the tiny target."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
CHECKED = """
import json
kept = spectrain.generate(target, again, ["What is a bee?", "Name three colours."], max_new_tokens=32)[0].text
print(json.dumps({"text": results[0].text, "kept": kept, "answers": len(results), "summary": summary}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the names of the page's blocks stand for, after all of them ran in an empty folder."""
    command = [sys.executable, "-c", "\n".join([*BLOCKS, CHECKED])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    place = tmp_path_factory.mktemp("python")
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (place / "runs" / "python" / "metrics.jsonl").is_file() and (place / "runs" / "my-drafter" / "config.json").is_file()
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_call_is_shown() -> None:
    """The page speaks of all that the interface has."""
    text = "\n".join(BLOCKS) + (ROOT / "docs" / "python.md").read_text()
    for call in (
        "Target.from_pretrained",
        "train(",
        "Drafter.from_pretrained",
        "generate(",
        "evaluate(",
        "save_pretrained",
        "push_to_hub",
    ):
        assert call in text


def test_it_answers(found: dict) -> None:
    """A result for each prompt; the drafter that was saved and read again gives the same text."""
    assert found["answers"] == 2 and found["text"].strip() and found["kept"] == found["text"]


def test_the_score_is_from_decoding(found: dict) -> None:
    """At least a token a forward, and every answer the target's."""
    summary = found["summary"]
    assert summary["acceptance_length"]["pooled"] >= 1
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] > 0
