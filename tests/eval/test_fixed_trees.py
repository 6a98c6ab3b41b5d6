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
from spectrain.eval.headline import describe_headline
from spectrain.eval.notes import describe_acceptance
from spectrain.eval.run import Evaluation
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
    assert "after the fit" in sentence and "untrained" in sentence


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
    """The headline names the fastest tree of the scored drafter, and never recommends what is
    slower than plain decoding.
    """
    summary = make_summary(ratios, quotable)
    assert choose_fastest(summary) == fastest
    (sentence,) = describe_headline(summary)
    own = max(ratios, key=lambda name: ratios[name])
    assert sentence.startswith(f"{own.capitalize()}: {ratios[own]:.2f}")
    assert ("use no drafter" in sentence) == (fastest == AUTOREGRESSIVE)
    assert ("which is unreliable here" in sentence) == (fastest is None)


def test_a_drafter_of_others_never_comes_first() -> None:
    """What the user did not train is named behind the speed of what she trained."""
    own, other = describe_headline(make_summary({"drafter": 1.2, "shipped": 1.9, "ngram": 1.5}))
    assert own.startswith("Drafter: 1.20 times")
    assert other == "Faster here: shipped, 1.90 times."


def make_acceptance(**lengths: float) -> dict[str, Any]:
    def gain(over: str) -> dict[str, Any]:
        ratio = lengths["drafter"] / lengths[over]
        return {"over": over, "ratio": ratio, "ci95": [ratio - 0.1, ratio + 0.1]}

    before = "start" if "start" in lengths else "untrained"
    return {
        "chain": {
            "label": "chain of 3",
            "prompts": 20,
            "drafters": {name: {"pooled": length} for name, length in lengths.items()},
            "gain": gain(before),
            "training_gain": gain("untrained") if "untrained" in lengths else None,
        }
    }


def test_the_first_sentence_counts_what_training_gained() -> None:
    """It compares before and after in one tree, and tells the fit from the steps."""
    summary = make_summary({"drafter": 1.2})
    lengths = {"drafter": 1.5, "start": 1.25, "untrained": 1.0}
    first = describe_headline({**summary, "acceptance": make_acceptance(**lengths)})[0]
    assert first == (
        "Training took tokens per forward from 1.00 to 1.50 (chain of 3, 20 prompts): 1.50 times "
        "(95 % 1.40 to 1.60); the fit reached 1.25, and the steps after it made 1.20 times that "
        "(95 % 1.10 to 1.30)."
    )
    lengths |= {"start": 1.48}
    first = describe_headline({**summary, "acceptance": make_acceptance(**lengths)})[0]
    assert first.endswith(
        "the steps after it made 1.01 times that (95 % 0.91 to 1.11), which is uncertain."
    )
    lengths |= {"start": 1.5}
    first = describe_headline({**summary, "acceptance": make_acceptance(**lengths)})[0]
    assert first.endswith("all of it is the fit of the initial weights.")
    lengths |= {"untrained": 1.45}
    first = describe_headline({**summary, "acceptance": make_acceptance(**lengths)})[0]
    assert "1.03 times (95 % 0.93 to 1.13), which is uncertain; all of it" in first
    lengths = {"drafter": 1.5, "start": 1.25}
    first = describe_headline({**summary, "acceptance": make_acceptance(**lengths)})[0]
    assert (
        first.startswith("Training took tokens per forward from 1.25 to 1.50")
        and "fit" not in first
    )


def test_the_speed_has_a_reason() -> None:
    """A round's cost in steps is tokens per forward over the predicted speedup; with verification
    at the cost of a step, a round costs that step and its drafting.
    """
    summary = make_summary({"drafter": 1.2})
    summary["acceptance_length"]["pooled"] = 1.8
    summary["time_share"] = {"draft": 0.2, "verify": 0.6, "accept": 0.0, "other": 0.2}
    (sentence,) = describe_headline(summary)
    cost = 1.8 / 1.2
    assert f"a round makes 1.80 tokens and takes as long as {cost:.2f} steps" in sentence
    assert f"it would be {1.8 / (1 + cost * 0.25):.2f} times" in sentence
    # A round that takes less than a step was compared with disturbed steps.
    summary["speedup"]["predicted"] = 2.0
    assert "takes as long as" not in next(iter(describe_headline(summary)))


def test_counts_and_times_are_apart_with_a_limit_of_time(shallow: Target, tmp_path: Path) -> None:
    """With a limit, tokens per forward of a chain are counted on every prompt, many at once, and
    equal those of decoding each alone; an untrained drafter is not timed.
    """
    drafter = Causal(shallow, num_layers=2)
    untrained = EarlyExit(shallow, 1)
    candidate = Candidate(
        shallow, drafter, Chain(4), Greedy(), SETTING, make_untrained=lambda: untrained
    )
    summaries = {}
    for minutes in (None, 10.0):
        evaluation = make_evaluation(tmp_path, ("untrained", "fixed"))
        evaluation.max_minutes = minutes
        summaries[minutes] = evaluation.score(candidate, tmp_path / f"out{minutes}")
    free, limited = summaries.values()
    assert [*limited["acceptance"]] == ["chain"]
    assert limited["acceptance"]["chain"] == free["acceptance"]["chain"]
    assert limited["acceptance"]["chain"]["prompts"] == len(QUESTIONS)
    assert "untrained" in free["compared"] and "untrained" not in limited["compared"]
    assert limited["headline"] == describe_headline(limited)
