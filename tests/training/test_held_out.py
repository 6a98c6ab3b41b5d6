"""What is held out is never trained on, is measured as scoring would, and changes nothing of the training."""

import json
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset, split_held_out
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training import validation as held_out
from spectrain.training.metrics import TrainingProgress
from spectrain.training.trainer import Trainer
from spectrain.training.validation import ANSWER_TOKENS, DRAFT_DEPTH, measure_acceptance


def conversations(count: int, size: int = 1) -> list[list[Example]]:
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (count, size, 16)).tolist()
    return [[Example(row, [place >= 6 for place in range(16)]) for row in found] for found in rows]


def keys(examples: list[Example]) -> set[str]:
    return {example.content_hash for example in examples}


# Which


@pytest.mark.parametrize(("count", "share", "least", "most"), [
    (400, 0.02, 1, 20), (400, 0.25, 70, 130), (10, 0.001, 1, 1), (2, 0.9, 1, 1), (1, 0.5, 0, 0), (50, 0.0, 0, 0),
])  # fmt: skip
def test_a_share_is_held_out(count: int, share: float, least: int, most: int) -> None:
    """About the share, one at least and never all; whole conversations, in every order the same, and no other is lost."""
    every = conversations(count, size=2)
    kept, apart = split_held_out(every, share)
    assert 2 * least <= len(apart) <= 2 * most and len(kept) + len(apart) == 2 * count
    assert not keys(kept) & keys(apart) and all(len(keys(found) & keys(apart)) in (0, 2) for found in every)
    Random(1).shuffle(every)
    assert keys(split_held_out(every, share)[1]) == keys(apart)


def test_more_data_holds_out_what_was_and_twins_go_together() -> None:
    """A conversation stays where it was when others join, and one that is there twice is on one side."""
    every = conversations(300)
    few, many = split_held_out(every[:200], 0.1)[1], split_held_out(every, 0.1)[1]
    assert keys(few) == keys(many) & keys([example for found in every[:200] for example in found])
    kept, apart = split_held_out([*every, *every], 0.1)
    assert len(apart) == 2 * len(many) and not keys(kept) & keys(apart)


# What is said of it


@torch.no_grad()
def test_acceptance_is_that_of_the_targets_own_answers(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """By depth, agreement and the sum of min(p, q) equal a sum over full forwards of both models by hand."""
    monkeypatch.setattr(held_out, "MAX_CONVERSATIONS", 8)
    drafter = Causal(shallow, num_layers=1)
    examples = [example for found in conversations(3) for example in found]
    hits, overlaps, counts = ([0.0] * DRAFT_DEPTH for _ in range(3))
    for example in examples:
        answer = decode(shallow, [example.prompt], Greedy(), ANSWER_TOKENS)[0].output
        text = torch.tensor([example.prompt + answer])
        p, q = (
            model.head.logits(model.features(text, ("final",)).at_layer("final"))[0].softmax(-1)
            for model in (shallow, drafter.model)
        )
        for place in range(len(answer) - 1):
            depth = place % (DRAFT_DEPTH + 1)
            if depth < DRAFT_DEPTH:
                at = len(example.prompt) + place
                hits[depth] += float(p[at].argmax() == q[at].argmax())
                overlaps[depth] += float(torch.minimum(p[at], q[at]).sum())
                counts[depth] += 1
    found = measure_acceptance(drafter.train(), shallow, examples)
    assert drafter.training
    acceptance = [total / count for total, count in zip(overlaps, counts)]
    assert found["agreement"] == pytest.approx([total / count for total, count in zip(hits, counts)], abs=1e-4)
    assert found["acceptance"] == pytest.approx(acceptance, abs=1e-3)
    assert found["forecast"] == pytest.approx(1 + sum(accumulate(acceptance, mul)), abs=1e-3)


def test_really_decoding_keeps_what_is_forecast_where_every_draft_is_right(shallow: Target, shallow_folder: Path) -> None:
    """A drafter that is the whole target: each round keeps the chain and one token more."""
    drafter = Causal(shallow, model=str(shallow_folder))
    found = measure_acceptance(drafter, shallow, [example for found in conversations(2) for example in found])
    assert found["agreement"] == [1.0] * DRAFT_DEPTH
    assert found["acceptance_length"] == found["forecast"] == pytest.approx(DRAFT_DEPTH + 1, abs=1e-3)


def test_measures_of_sources_add_up_to_the_total(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source alone gives its measures; weighted by their positions they are the total, which sources do not change."""
    monkeypatch.setattr(held_out, "MAX_CONVERSATIONS", 8)
    examples = [example for found in conversations(6) for example in found]
    sources = ["chat", "tools", "tools", "chat", "tools", "chat"]
    drafter = Causal(shallow, num_layers=1)
    total = measure_acceptance(drafter, shallow, examples, sources)
    by_source = total.pop("by_source")
    assert total == measure_acceptance(drafter, shallow, examples) and list(by_source) == ["chat", "tools"]
    for source, measures in by_source.items():
        own = [example for example, name in zip(examples, sources) if name == source]
        assert measures == measure_acceptance(drafter, shallow, own)
    assert total["places"] == [sum(counts) for counts in zip(*(measures["places"] for measures in by_source.values()))]
    for key in ("agreement", "acceptance"):
        for depth, value in enumerate(total[key]):
            weighted = sum(measures[key][depth] * measures["places"][depth] for measures in by_source.values())
            assert value == pytest.approx(weighted / total["places"][depth], abs=1e-4)


def test_a_mixture_logs_the_measures_of_its_sources(shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """metrics.jsonl has them under held_out, by_source; without sources it has none."""
    monkeypatch.setattr("spectrain.training.validation.MAX_CONVERSATIONS", 8)
    held_out = [example for found in conversations(14)[12:] for example in found]
    _, lines = fit(shallow, tmp_path / "mix", held_out, sources=["chat", "tools"])
    measured = [line["held_out"] for line in lines if "held_out" in line]
    assert measured and all(list(measures["by_source"]) == ["chat", "tools"] for measures in measured)
    _, plain = fit(shallow, tmp_path / "plain", held_out)
    del measured[-1]["by_source"]
    assert measured[-1] == plain[-1]["held_out"]


class Killed(Exception):
    """Stands for a kill between two steps."""


def fit(
    target: Target, run: Path, held_out: list[Example], dies: int = 0, sources: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights and metrics of six steps, which may be killed once and gone on with."""
    examples = [example for found in conversations(12) for example in found]
    data = Dataset(examples, 12, 0, 0, held_out=held_out, held_out_sources=[*sources])
    trainer = Trainer(lr=1e-3, max_steps=6, batch_tokens=48, log_every=4, save_every=3)

    def kill(step: int) -> None:
        if step == dies:
            raise Killed

    def once() -> Eagle3:
        torch.manual_seed(0)
        drafter = Eagle3(target, ttt_steps=2, vocab_size=256)
        drafter.prepare(target, torch.arange(target.head.vocab_size))
        trainer.fit(drafter, target, data, LiveSource(), run, on_step=kill)
        return drafter

    if dies:
        with pytest.raises(Killed):
            once()
        dies = 0
    return dict(once().state_dict()), [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_looking_changes_nothing_and_survives_a_kill(shallow: Target, tmp_path: Path) -> None:
    """Weights are those of a training that never looks; lines with checkpoints and the last have it, after a kill as well."""
    held_out = [example for found in conversations(14)[12:] for example in found]
    plain, lines = fit(shallow, tmp_path / "plain", [])
    assert [line["step"] for line in lines] == [1, 4, 6] and not any("held_out" in line for line in lines)
    weights, lines = fit(shallow, tmp_path / "looks", held_out)
    assert all(torch.equal(value, plain[name]) for name, value in weights.items())
    assert [line["step"] for line in lines] == [1, 3, 4, 6] and ["held_out" in line for line in lines] == [
        False,
        True,
        False,
        True,
    ]
    resumed, again = fit(shallow, tmp_path / "killed", held_out, dies=5)
    assert all(torch.equal(value, plain[name]) for name, value in resumed.items())
    told = ("step", "loss", "agreement", "held_out")
    assert [[line.get(key) for key in told] for line in again] == [[line.get(key) for key in told] for line in lines]


def test_the_line_says_which_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of training batches and of what was held out are told apart."""
    said = {"loss": 1.0, "agreement": [0.5], "tokens_per_second": 9.0}
    held_out = {"agreement": [0.4], "acceptance": [0.3, 0.2], "forecast": 1.36}
    TrainingProgress(5, 0, enabled=True).update(5, {**said, "held_out": held_out})
    assert (
        "on training text: loss 1.000, agreement 0.50; 9 tokens/s; "
        "held out: acceptance 0.30 0.20, forecast 1.36 tokens per forward" in (capsys.readouterr().out)
    )
