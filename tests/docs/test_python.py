"""The page about the Python interface: its blocks run, in order, on the tiny target."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import spectrain
from spectrain.models.fast import is_packed

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL
)
SMALLER = {
    'trainer={"max_steps": 12}': 'trainer={"max_steps": 3}, **{"data.limit": 20}',
    "limit=4": "limit=2",
    "tokens=32": "tokens=12",
}
CHECKED = """
questions = ["What is a bee?", "Name three colours."]
reloaded_text = spectrain.generate(target, again, questions, max_new_tokens=12)[0].text
"""
EVENTS = """
import spectrain

events = []


class PrintGain(spectrain.Callback):
    def on_step(self, step):
        events.append(("step", step))

    def on_metrics(self, step, metrics):
        events.append(("metrics", step))

    def on_checkpoint(self, step, path):
        events.append(("checkpoint", path.name))
"""


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names of the page's blocks, after all of them ran in an empty folder, on
    smaller numbers.
    """
    code = "\n".join([*BLOCKS, CHECKED])
    shown_class = re.search(r"^class PrintGain.*?\n\n\n", code, re.MULTILINE | re.DOTALL)
    assert shown_class is not None
    # What the page prints is recorded instead.
    code = code.replace(shown_class[0], EVENTS)
    for shown, smaller in SMALLER.items():
        assert shown in code
        code = code.replace(shown, smaller)
    folder = tmp_path_factory.mktemp("python")
    names = dict[str, Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            exec(code, names)
        finally:
            spectrain.use_logging(False)
    assert (folder / "runs" / "python" / "metrics.jsonl").is_file() and (
        folder / "runs" / "my-drafter" / "config.json"
    ).is_file()
    return {**names, "folder": folder}


def test_every_call_is_shown() -> None:
    """The page uses every call of the interface."""
    text = "\n".join(BLOCKS) + (ROOT / "docs" / "python.md").read_text()
    for call in (
        "Target.from_pretrained",
        "train(",
        "Drafter.from_pretrained",
        "generate(",
        "evaluate(",
        "save_pretrained",
        "push_to_hub",
        "callbacks=[",
        "use_logging(",
        "__version__",
    ):
        assert call in text


def test_each_prompt_has_an_answer(namespace: dict[str, Any]) -> None:
    """A drafter that was saved and loaded again gives the same text."""
    first, second = (result.text for result in namespace["results"])
    assert first.strip() and second.strip() and namespace["reloaded_text"] == first


def test_plain_decoding_runs_what_drafted_decoding_runs() -> None:
    """Both use the same packed linears; otherwise their times could not be compared."""
    target = spectrain.Target.from_pretrained("tiny")
    assert not any(is_packed(module) for module in target.model.modules())
    spectrain.generate(target, None, ["What is a bee?"], max_new_tokens=2)
    assert is_packed(target.model.model.layers[0].mlp.down_proj)


def test_the_score_is_from_decoding(namespace: dict[str, Any]) -> None:
    """Each forward emits at least a token, and every answer equals the target's."""
    summary = namespace["summary"]
    assert summary["acceptance_length"]["pooled"] >= 1
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] > 0


def test_callbacks_hear_of_steps_and_checkpoints(namespace: dict[str, Any]) -> None:
    """The page's training has four steps, logs the first and the last, and saves after two."""
    assert namespace["events"] == [
        ("metrics", 1),
        ("step", 1),
        ("checkpoint", "step-000002"),
        ("step", 2),
        ("step", 3),
        ("metrics", 4),
        ("step", 4),
    ]


def test_results_are_typed_and_plain(namespace: dict[str, Any]) -> None:
    """A result has its numbers as attributes, prints one line, and is a dict on request."""
    run, summary, drafter = (namespace[name] for name in ("run", "summary", "drafter"))
    assert run.steps == run.metrics["step"] == 3 and run.evaluation is None
    assert (run / "drafter" / "config.json").name == "config.json" and run.drafter.name == "drafter"
    assert summary.acceptance_length == summary["acceptance_length"]["pooled"]
    assert json.loads(json.dumps(summary.to_dict())) == summary.to_dict() == summary
    assert json.loads(json.dumps(run.to_dict()))["folder"] == str(run) == "runs/python"
    shown = [repr(value) for value in (run, summary, drafter, namespace["target"])]
    assert all("\n" not in line and len(line) < 200 for line in shown)
    assert shown[1].startswith(f"EvalResult({summary['label']}: ")
    assert shown[2] == "Drafter(eagle3, target=tiny, tree=eagle2, 'runs/python')"
    assert shown[3] == "Target('tiny', LlamaForCausalLM, 8 layers, float32, cpu)"
    assert repr(namespace["results"][0]).startswith("Answer('")


def test_a_list_of_conversations_is_the_data(namespace: dict[str, Any]) -> None:
    """Its rows are in one file beside the run folder, which the run's settings name."""
    own = namespace["own"]
    (path,) = (namespace["folder"] / "runs" / "data").iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["messages"] for row in rows] == namespace["conversations"]
    settings = (namespace["folder"] / own / "config.yaml").read_text()
    assert f"path: runs/data/{path.name}" in settings and "choice: tiny" in settings


def test_a_drafter_is_uploaded_with_its_card(
    namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card says for which target the drafter is, and how Python loads it."""
    cards = list[str]()

    def record(directory: Path, name: str, private: bool) -> str:
        cards.append((directory / "README.md").read_text())
        return f"https://hub/{name}"

    monkeypatch.setattr("spectrain.cli.interface.push", record)
    assert namespace["drafter"].push_to_hub("me/bees") == "https://hub/me/bees"
    assert "# EAGLE-3 drafter for tiny" in cards[0]
    assert 'spectrain.Target.from_pretrained("tiny")' in cards[0]
    assert 'spectrain.Drafter.from_pretrained("me/bees", target)' in cards[0]
