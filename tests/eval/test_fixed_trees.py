"""Acceptance in fixed trees is that of decoding with them, and one function names the winner."""

import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.rejection import SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.causal import Causal
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.columns import AUTOREGRESSIVE, choose_fastest
from spectrain.eval.fixed_trees import choose_trees
from spectrain.eval.notes import describe_acceptance, recommend_system
from spectrain.eval.run import Evaluation
from spectrain.export.card import fastest_line
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Auto, Chain, Eagle2

SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
QUESTIONS = ["Name a color.", "Count: one two three one two three one two", "Why is the sky blue?"]
NUM_TOKENS = 12


def make_evaluation(folder: Path, baselines: tuple[str, ...]) -> Evaluation:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    settings: dict[str, Any] = {
        "calibration_limit": 2,
        "oracle": False,
        "report": False,
        "repeats": 1,
        "check": False,
    }
    return Evaluation(prompts=str(path), max_new_tokens=NUM_TOKENS, baselines=baselines, **settings)


def test_acceptance_is_that_of_decoding_with_the_tree(shallow: Target, tmp_path: Path) -> None:
    """Tokens per forward of the chain of 3 and of 16 nodes equal a count over the complete rounds
    of `decode`; the tree=auto of a request, which decides whether to draft, is a row beside them.
    """
    drafter = Causal(shallow, num_layers=2)
    candidate = Candidate(shallow, drafter, Auto(3, 8, 2), Greedy(), SETTING)
    summary = make_evaluation(tmp_path, ("own", "fixed")).score(candidate, tmp_path / "out")
    samples = [
        json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()
    ]
    for name, builder in (("chain", Chain(3)), ("tree", Eagle2())):
        rounds = [
            length
            for sample in samples
            for length in decode(
                shallow, [sample["prompt_tokens"]], Greedy(), NUM_TOKENS, drafter, builder
            )[0].complete_round_lengths
        ]
        entry = summary["acceptance"][name]["drafters"]["drafter"]
        assert (
            entry["pooled"] == pytest.approx(sum(rounds) / len(rounds), abs=1e-4)
            and entry["pooled"] > 1
        )
    assert (
        summary["acceptance_length"]["pooled"]
        == summary["acceptance"]["chain"]["drafters"]["drafter"]["pooled"]
    )
    assert (
        summary["setting"]["tree"]["name"] == "chain"
        and summary["compared"]["own"]["tree"]["name"] == "auto"
    )
    assert 0 <= summary["compared"]["own"]["drafted_rounds"] <= summary["compared"]["own"]["rounds"]


def test_fixed_trees_are_those_that_a_drafter_can_draft(shallow: Target) -> None:
    """A drafter of chains has only the chain; under a rule that refuses the tree of 16 nodes,
    its own branching tree serves.
    """
    assert [*choose_trees(Chain(5), Greedy(), Capabilities())] == ["chain", "tree"]
    assert [*choose_trees(Chain(5), Greedy(), Capabilities(chains_only=True))] == ["chain"]
    with pytest.raises(UserError):
        SpeculativeSampling().check_children(Eagle2().children, False)
    assert choose_trees(Chain(5), Greedy(), Ngram(shallow).capabilities)["tree"].budget == 16
    assert "tree" not in choose_trees(Chain(5, "sampled"), SpeculativeSampling(), Capabilities())


def test_the_gain_is_over_the_start_of_the_training(shallow: Target, tmp_path: Path) -> None:
    """Where the drafter before the first step is known, it is decoded in the fixed trees, and
    the gain is the ratio to it.
    """
    drafter = Causal(shallow, num_layers=2)
    start = Causal(shallow, num_layers=1)
    untrained = EarlyExit(shallow, 1)
    candidate = Candidate(
        shallow,
        drafter,
        Chain(4),
        Greedy(),
        SETTING,
        make_untrained=lambda: untrained,
        make_start=lambda: start,
    )
    summary = make_evaluation(tmp_path, ("untrained", "fixed")).score(candidate, tmp_path / "out")
    samples = [
        json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()
    ]
    rounds = [
        length
        for sample in samples
        for length in decode(
            shallow, [sample["prompt_tokens"]], Greedy(), NUM_TOKENS, start, Chain(3)
        )[0].complete_round_lengths
    ]
    entry = summary["acceptance"]["chain"]
    drafters = entry["drafters"]
    gain = entry["gain"]
    assert set(drafters) == {"drafter", "start", "untrained"} and "start" not in summary["compared"]
    assert drafters["start"]["pooled"] == pytest.approx(sum(rounds) / len(rounds), abs=1e-4)
    assert gain["over"] == "start"
    assert gain["ratio"] == pytest.approx(
        drafters["drafter"]["pooled"] / drafters["start"]["pooled"], abs=1e-3
    )
    sentence = next(describe_acceptance(summary))
    assert "before training" in sentence and "without the fit" in sentence


def make_summary(ratios: dict[str, float], quotable: bool = True) -> dict[str, Any]:
    """Return what the surfaces read of a summary: the speedup of every system."""
    entries = {
        name: {
            "label": name,
            "speedup": {
                "ratio": ratio,
                "ci95": [ratio, ratio],
                "quotable": quotable,
                "predicted": ratio,
                "at_most": 9.0,
            },
            "acceptance_length": {"pooled": 3.0},
        }
        for name, ratio in ratios.items()
    }
    return {**entries.pop("drafter"), "compared": entries, "setting": {"prompts": 9}}


@pytest.mark.parametrize(
    ("ratios", "quotable", "fastest"),
    [
        ({"drafter": 1.2, "own": 1.5, "copies": 1.4}, True, "own"),
        ({"drafter": 1.6, "own": 1.5}, True, "drafter"),
        ({"drafter": 0.9, "own": 0.8}, True, AUTOREGRESSIVE),
        ({"drafter": 1.2, "own": 1.5}, False, None),
    ],
)
def test_one_function_names_the_winner(
    ratios: dict[str, float], quotable: bool, fastest: str | None
) -> None:
    """Terminal and card say what `choose_fastest` says, and never recommend what is slower than
    plain decoding.
    """
    summary = make_summary(ratios, quotable)
    assert choose_fastest(summary) == fastest
    sentence = " ".join(recommend_system(summary))
    card = " ".join(fastest_line({"recommended": fastest, **summary}))
    if fastest is None:
        assert "Nothing is recommended" in sentence and not card
    elif fastest == AUTOREGRESSIVE:
        assert "plain decoding is fastest" in sentence and "Plain decoding was fastest" in card
    else:
        winner = summary["compared"].get(fastest, summary)["label"]
        assert sentence.startswith(f"Use {winner}: {ratios[fastest]:.2f} times as fast")
        assert f"Fastest there: {winner}, {ratios[fastest]:.2f} times" in card
