"""Every tree builder of conf/tree as its yaml has it: what holds for all of them holds for a new
one by itself.
"""

from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spectrain.config.build import build
from spectrain.config.choices import choice_files, conf_folders
from spectrain.trees import TreeBuilder
from spectrain.trees.measurements import Calibration, Latency
from tests.trees.tables import assert_rows_alone, grow_tree, random_scores, shared_scores

FILES = sorted(choice_files("tree", conf_folders()).values())
# whatever a builder may ask for: chances of children, and times at which drafting pays
MEASURED = Calibration(
    [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1]],
    [30, 20],
    Latency({0: {1: 1.0, 64: 2.0}}, {0: {1: 0.1, 64: 0.2}}, 0.1),
)


def make_builder(file: Path, temperature: float | None = None) -> TreeBuilder | None:
    """Make a prepared builder; with a temperature its sampled variant, or None where there is
    none.
    """
    builder: TreeBuilder | None = build(OmegaConf.load(file))  # type: ignore[arg-type]
    if builder is not None and temperature is not None:
        builder = builder.sampled_variant(temperature)
    if builder is not None and builder.requirements:
        builder.prepare(MEASURED)
    return builder


@pytest.mark.parametrize("temperature", [None, 0.8], ids=["as it is", "drawn"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_tree_choice_grows_trees(file: Path, temperature: float | None) -> None:
    """Trees are valid, within their budget and depth, hold the distribution of their draws, and
    repeat. A row's tree is the one that it has alone, except with builders that weigh the complete
    batch, for which all rows are alike here."""
    builder = make_builder(file, temperature)
    make_same_builder = partial(make_builder, file, temperature)
    if builder is None:
        assert temperature is not None
        return
    assert builder.name == file.stem
    tree = grow_tree(make_same_builder)  # type: ignore[arg-type]
    assert (tree.q is None) == (builder.children == "deterministic")
    assert temperature is None or tree.q is not None
    assert_rows_alone(
        make_same_builder, shared_scores if builder.traits.uses_latency else random_scores
    )  # type: ignore[arg-type]
