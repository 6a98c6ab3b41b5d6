"""The page about the Python interface: its blocks run, in order, on the tiny target."""

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
    '"trainer.max_steps": 12': '"trainer.max_steps": 3, "data.limit": 20',
    "limit=4": "limit=2",
    "tokens=32": "tokens=12",
}
CHECKED = """
questions = ["What is a bee?", "Name three colours."]
reloaded_text = spectrain.generate(target, again, questions, max_new_tokens=12)[0].text
"""


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names of the page's blocks, after all of them ran in an empty folder, on
    smaller numbers.
    """
    code = "\n".join([*BLOCKS, CHECKED])
    for shown, smaller in SMALLER.items():
        assert shown in code
        code = code.replace(shown, smaller)
    folder = tmp_path_factory.mktemp("python")
    names = dict[str, Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, names)
    assert (folder / "runs" / "python" / "metrics.jsonl").is_file() and (
        folder / "runs" / "my-drafter" / "config.json"
    ).is_file()
    return names


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
