"""Greedy identity at length: what drafts in one pass, trained for a little, changes no answer of sixty."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from spectrain.runs.defaults import complete
from spectrain.runs.score import evaluate
from spectrain.runs.train import train
from spectrain.settings.check import check_config
from spectrain.settings.keys import TRAIN_KEYS

PROMPTS, TOKENS = 60, 32


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dflash", "dspark", "dflash2", "peagle"])
def test_sixty_answers_are_the_targets(recipe: str, tmp_path: Path) -> None:
    """Chains and trees of a drafter that has learnt something, held against transformers' generate."""
    asked = [
        f"recipe={recipe}",
        "target=tiny",
        "eval=none",
        f"run={tmp_path / 'run'}",
        "++data.limit=120",
        "++trainer.epochs=2",
    ]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=asked)
    train(check_config(config, TRAIN_KEYS), [word.lstrip("+") for word in asked])
    for tree in (["tree=chain", "tree.depth=4"], ["tree=eagle2", "tree.depth=4", "++tree.budget=12"]):
        asked = [f"run={tmp_path / 'run'}", "target=tiny", *tree, "eval=default", f"++eval.limit={PROMPTS}",
                 f"++eval.max_new_tokens={TOKENS}", "++eval.baselines=[]", "++eval.oracle=false",
                 f"++eval.name={tree[0].replace('=', '-')}"]  # fmt: skip
        with initialize_config_module("spectrain.conf", version_base="1.3"):
            found, place = complete(compose("eval", overrides=asked))
        summary = evaluate(check_config(found, TRAIN_KEYS), place)
        print(recipe, tree[0], summary["acceptance_length"], summary["lossless"]["identical"], summary["lossless"]["near_ties"])
        assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == PROMPTS
        assert summary["acceptance_length"]["pooled"] > 1.1
