"""The notebook runs from its first cell to its last on the tiny target, and shows what it says."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def cell_outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the notebook in an empty folder, by this Python, with this source; return what each
    code cell prints, by its id.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {
        cell.id: "".join(out.text for out in cell.outputs if out.get("name") == "stdout")
        for cell in cells
    }


def test_it_is_committed_without_outputs() -> None:
    """The notebook has no outputs, so that no number in it is older than the code."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_training_learns(cell_outputs: dict[str, str]) -> None:
    """The loss of the last step is below that of the first."""
    first, last = map(float, re.findall(r"(?:loss|,) (\d+\.\d+) at step", cell_outputs["train"]))
    assert last < first


@pytest.mark.slow
def test_it_answers(cell_outputs: dict[str, str]) -> None:
    """The answer has a text and its statistics; the drafter that was saved and read again gives
    the same text.
    """
    *text, statistics = cell_outputs["generate"].strip().splitlines()
    assert "".join(text).strip() and statistics
    assert cell_outputs["keep"].strip().splitlines()[-1] == "True"


@pytest.mark.slow
def test_the_score_is_from_decoding(cell_outputs: dict[str, str]) -> None:
    """At least a token a forward, inside its interval, and every answer the target's."""
    length, low, high = map(
        float, re.findall(r"\d+\.\d+", cell_outputs["score"].split("speedup")[0])
    )
    identical, checked = map(int, re.findall(r"(\d+) of (\d+)", cell_outputs["score"])[0])
    assert 1 <= low <= length <= high
    assert identical == checked > 0
