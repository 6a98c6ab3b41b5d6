"""Held-out data is never trained on, is measured as scoring measures it, and changes nothing of
the training.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from spectrain.data.chat import Example
from spectrain.data.dataset import MIN_HELD_OUT_SHARE, Dataset, split_held_out
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.replay import record_answers, replay
from spectrain.decoding.teacher_forcing import run_teacher_forced
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training import validation as held_out
from spectrain.training.metrics import TrainingProgress
from spectrain.training.trainer import Trainer
from spectrain.training.validation import (
    ANSWER_TOKENS,
    DRAFT_DEPTH,
    measure_acceptance,
    record_held_out,
    select_prompts,
)
from spectrain.training.validation_schedule import (
    MAX_VALIDATIONS,
    ValidationSchedule,
    count_affordable,
)
from spectrain.trees.chain import Chain


def measure_examples(
    drafter: Drafter, target: Target, examples: list[Example], sources: Sequence[str] = ()
) -> dict[str, Any]:
    """Record the target's answers to these examples and return the drafter's measures on them."""
    recorded = record_held_out(target, drafter.layers, examples, sources)
    assert recorded is not None
    return measure_acceptance(drafter, target, recorded).metrics


def make_conversations(count: int, size: int = 1) -> list[list[Example]]:
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (count, size, 16)).tolist()
    return [
        [Example(row, [position >= 6 for position in range(16)]) for row in texts] for texts in rows
    ]


def content_hashes(examples: list[Example]) -> set[str]:
    return {example.content_hash for example in examples}


# Splitting


@pytest.mark.parametrize(
    ("count", "share", "least", "most"),
    [
        (400, 0.02, 2, 20),
        (400, 0.25, 70, 130),
        (10, 0.001, 0, 0),
        (50, 0.0, 0, 0),
    ],
)
def test_a_share_is_held_out(count: int, share: float, least: int, most: int) -> None:
    """About the share is held out, as complete conversations, the same in any order."""
    all_conversations = make_conversations(count, size=2)
    training, validation = split_held_out(all_conversations, share)
    assert 2 * least <= len(validation) <= 2 * most and len(training) + len(validation) == 2 * count
    assert not content_hashes(training) & content_hashes(validation) and all(
        len(content_hashes(conversation) & content_hashes(validation)) in (0, 2)
        for conversation in all_conversations
    )
    Random(1).shuffle(all_conversations)
    assert content_hashes(split_held_out(all_conversations, share)[1]) == content_hashes(validation)


def test_auto_leaves_something_to_train_on() -> None:
    """A conversation that is the only one is trained on, whatever side it would be on."""
    all_conversations = make_conversations(300)
    apart = [c for c in all_conversations if split_held_out([c], MIN_HELD_OUT_SHARE)[1]]
    assert apart
    for conversation in apart:
        assert split_held_out([conversation], "auto") == (conversation, [])
        assert split_held_out([conversation], MIN_HELD_OUT_SHARE) == ([], conversation)


def test_a_side_depends_on_nothing_else_and_twins_go_together() -> None:
    """Every conversation alone is on the side that it has among others, and duplicates are on
    the same side.
    """
    all_conversations = make_conversations(300)
    many = split_held_out(all_conversations, 0.1)[1]
    alone = [split_held_out([conversation], 0.1)[1] for conversation in all_conversations]
    assert content_hashes(many) == content_hashes([example for part in alone for example in part])
    training, validation = split_held_out([*all_conversations, *all_conversations], 0.1)
    assert len(validation) == 2 * len(many) and not content_hashes(training) & content_hashes(
        validation
    )


# Measures


@torch.no_grad()
def test_acceptance_is_that_of_the_targets_own_answers(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By depth, agreement and the sum of min(p, q) equal sums over full forwards of both models
    by hand.
    """
    monkeypatch.setattr(held_out, "MAX_CONVERSATIONS", 8)
    drafter = Causal(shallow, num_layers=1)
    examples = [example for conversation in make_conversations(3) for example in conversation]
    hits, overlaps, counts = ([0.0] * DRAFT_DEPTH for _ in range(3))
    for example in examples:
        answer = decode(shallow, [example.prompt], Greedy(), ANSWER_TOKENS)[0].output
        text = torch.tensor([example.prompt + answer])
        p, q = (
            model.head.logits(model.features(text, ("final",)).at_layer("final"))[0].softmax(-1)
            for model in (shallow, drafter.model)
        )
        for root in range(len(answer) - 1):
            for depth in range(min(DRAFT_DEPTH, len(answer) - 1 - root)):
                index = len(example.prompt) + root + depth
                hits[depth] += float(p[index].argmax() == q[index].argmax())
                overlaps[depth] += float(torch.minimum(p[index], q[index]).sum())
                counts[depth] += 1
    measures = measure_examples(drafter.train(), shallow, examples)
    assert drafter.training
    acceptance = [total / count for total, count in zip(overlaps, counts)]
    agreement = [total / count for total, count in zip(hits, counts)]
    assert measures["agreement"] == pytest.approx(agreement, abs=1e-4)
    assert measures["acceptance"] == pytest.approx(acceptance, abs=1e-3)
    assert measures["forecast"] == pytest.approx(1 + sum(accumulate(agreement, mul)), abs=1e-3)
    assert measures["forecast_sampled"] == pytest.approx(
        1 + sum(accumulate(acceptance, mul)), abs=1e-3
    )


def test_really_decoding_keeps_what_is_forecast_where_every_draft_is_right(
    shallow: Target, shallow_folder: Path
) -> None:
    """With the target itself as drafter, each round accepts the chain and emits one token more."""
    drafter = Causal(shallow, model=str(shallow_folder))
    measures = measure_examples(
        drafter,
        shallow,
        [example for conversation in make_conversations(2) for example in conversation],
    )
    assert measures["agreement"] == [1.0] * DRAFT_DEPTH
    assert (
        measures["acceptance_length"]
        == measures["forecast"]
        == pytest.approx(DRAFT_DEPTH + 1, abs=1e-3)
    )


def test_measures_of_sources_add_up_to_the_total(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source has the measures of its examples alone; weighted by positions they add up to
    the total.
    """
    monkeypatch.setattr(held_out, "MAX_CONVERSATIONS", 8)
    examples = [example for conversation in make_conversations(6) for example in conversation]
    sources = ["chat", "tools", "tools", "chat", "tools", "chat"]
    drafter = Causal(shallow, num_layers=1)
    total = measure_examples(drafter, shallow, examples, sources)
    by_source = total.pop("by_source")
    assert total == measure_examples(drafter, shallow, examples) and list(by_source) == [
        "chat",
        "tools",
    ]
    for source, measures in by_source.items():
        own = [example for example, name in zip(examples, sources) if name == source]
        assert measures == measure_examples(drafter, shallow, own)
    assert total["places"] == [
        sum(counts) for counts in zip(*(measures["places"] for measures in by_source.values()))
    ]
    for key in ("agreement", "acceptance"):
        for depth, value in enumerate(total[key]):
            weighted = sum(
                measures[key][depth] * measures["places"][depth] for measures in by_source.values()
            )
            assert value == pytest.approx(weighted / total["places"][depth], abs=1e-4)


def test_a_mixture_logs_the_measures_of_its_sources(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """metrics.jsonl has them under held_out, by_source; without sources it has no by_source."""
    monkeypatch.setattr("spectrain.training.validation.MAX_CONVERSATIONS", 8)
    held_out = [example for conversation in make_conversations(14)[12:] for example in conversation]
    _, lines = fit_drafter(shallow, tmp_path / "mix", held_out, sources=["chat", "tools"])
    measured = [line["held_out"] for line in lines if "held_out" in line]
    assert measured and all(
        list(measures["by_source"]) == ["chat", "tools"] for measures in measured
    )
    _, plain = fit_drafter(shallow, tmp_path / "plain", held_out)
    del measured[-1]["by_source"]
    assert measured[-1] == plain[-1]["held_out"]


class Killed(Exception):
    """Stands for a kill between two steps."""


def fit_drafter(
    target: Target,
    run: Path,
    held_out: list[Example],
    kill_step: int = 0,
    sources: Sequence[str] = (),
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return weights and metrics of six steps, which may be killed once and resumed."""
    examples = [example for conversation in make_conversations(12) for example in conversation]
    data = Dataset(examples, 12, 0, 0, held_out=held_out, held_out_sources=[*sources])
    trainer = Trainer(lr=1e-3, max_steps=6, batch_tokens=48, log_every=4, save_every=3)

    def kill_at_step(step: int) -> None:
        if step == kill_step:
            raise Killed

    def train_once() -> Eagle3:
        torch.manual_seed(0)
        drafter = Eagle3(target, ttt_steps=2, vocab_size=256)
        drafter.prepare(target, torch.arange(target.head.vocab_size))
        trainer.fit(drafter, target, data, LiveSource(), run, on_step=kill_at_step)
        return drafter

    if kill_step:
        with pytest.raises(Killed):
            train_once()
        kill_step = 0
    return dict(train_once().state_dict()), [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def test_validation_changes_nothing_and_survives_a_kill(shallow: Target, tmp_path: Path) -> None:
    """Weights are those of a training without validation; lines with checkpoints and the last line
    have it, also after a kill."""
    held_out = [example for conversation in make_conversations(14)[12:] for example in conversation]
    plain, lines = fit_drafter(shallow, tmp_path / "plain", [])
    assert [line["step"] for line in lines] == [1, 4, 6] and not any(
        "held_out" in line for line in lines
    )
    weights, lines = fit_drafter(shallow, tmp_path / "looks", held_out)
    assert all(torch.equal(value, plain[name]) for name, value in weights.items())
    assert [line["step"] for line in lines] == [1, 3, 4, 6] and [
        "held_out" in line for line in lines
    ] == [
        False,
        True,
        False,
        True,
    ]
    resumed, resumed_lines = fit_drafter(shallow, tmp_path / "killed", held_out, kill_step=5)
    assert all(torch.equal(value, plain[name]) for name, value in resumed.items())
    keys = ("step", "loss", "agreement", "held_out")
    assert [[line.get(key) for key in keys] for line in resumed_lines] == [
        [line.get(key) for key in keys] for line in lines
    ]


def test_the_line_says_which_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed line separates numbers of training batches from those of held-out data."""
    measures = {"loss": 1.0, "agreement": [0.5], "tokens_per_second": 9.0}
    held_out = {"agreement": [0.3, 0.2], "acceptance": [0.4], "forecast": 1.36}
    TrainingProgress(5, 0, enabled=True).update(5, {**measures, "held_out": held_out})
    assert (
        "on training text: loss 1.000, agreement 0.50; 9 tokens/s; "
        "held out: agreement 0.30 0.20, forecast 1.36 tokens per forward"
        in (capsys.readouterr().out)
    )


# Places and intervals


def test_the_forecasts_interval_is_students_over_conversations() -> None:
    """At one depth with equal counts it is the interval of the mean of the conversations' rates."""
    rates = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    influences = held_out.forecast_influences(10 * rates[:, None], torch.full((3, 1), 10))
    mean = float(rates.mean())
    error = float(rates.std()) / 3**0.5
    quantile = 4.302653  # Student's t, 2 degrees of freedom, 97.5 %
    expected = [1 + mean - quantile * error, 1 + mean + quantile * error]
    assert held_out.interval_around(1 + mean, influences) == pytest.approx(expected, abs=1e-4)
    assert held_out.interval_around(1 + mean, influences[:1]) is None


def test_influences_follow_the_derivatives_of_the_forecast() -> None:
    """With two depths the slopes of 1 + a + a b are 1 + b and a, whatever the conversations'
    sizes.
    """
    sums = torch.tensor([[3.0, 1.0], [2.0, 2.0]])
    counts = torch.tensor([[6, 4], [4, 2]])
    first = 5 / 10
    second = 3 / 6
    expected = [
        (1 + second) * (total - first * count) / 10 + first * (deeper - second * places) / 6
        for (total, deeper), (count, places) in zip(sums.tolist(), counts.tolist())
    ]
    assert held_out.forecast_influences(sums, counts) == pytest.approx(expected)


def test_a_piece_of_a_long_text_is_continued_from_its_middle() -> None:
    document = Example([1, 2, 3, 4], [False, True, True, True])
    piece = Example([5, 6, 7, 8, 9], [True] * 5)
    token = Example([5], [True])
    selected = select_prompts([document, piece, token], max_length=512)
    assert selected.prompts == [[1], [5, 6]]


def test_validations_take_a_twentieth_of_the_time() -> None:
    """With the ones before and the one at the end they fit into 5 % of the time, and one more
    would not.
    """
    assert count_affordable(total=1000, spent=12, each=4) == 8
    assert 12 + 9 * 4 <= 0.05 * 1000 < 12 + 10 * 4
    assert count_affordable(total=100, spent=4, each=4) == 0


def test_validations_are_evenly_distributed() -> None:
    """Three that are left divide the remaining steps into four parts; a run has a largest number
    of them.
    """
    schedule = ValidationSchedule()
    schedule.update(last=0, num_steps=100, num_done=1, num_affordable=3)
    assert schedule.next_step == 25
    schedule.update(last=25, num_steps=100, num_done=2, num_affordable=2)
    assert schedule.next_step == 50
    schedule.update(last=50, num_steps=100, num_done=MAX_VALIDATIONS - 1, num_affordable=9)
    assert schedule.next_step == float("inf")


def test_two_drafters_are_judged_at_the_same_places(shallow: Target) -> None:
    """The target's answers and the places do not depend on the drafter."""
    examples = [example for conversation in make_conversations(2) for example in conversation]
    drafters = Causal(shallow, num_layers=1), Eagle3(shallow, vocab_size=64)
    recorded = [held_out.record_held_out(shallow, drafter.layers, examples) for drafter in drafters]
    assert recorded[0] is not None and recorded[1] is not None
    assert recorded[0].texts.answers == recorded[1].texts.answers
    causal, eagle = (
        measure_acceptance(drafter, shallow, texts).metrics["places"]
        for drafter, texts in zip(drafters, recorded)
        if texts
    )
    assert causal == eagle


def test_replayed_chains_accept_what_teacher_forcing_measures(shallow: Target) -> None:
    """The drafts after the roots of teacher-forced rounds have the same overlaps in a replay of
    the same answers.
    """
    torch.manual_seed(0)
    drafter = Eagle3(shallow, vocab_size=256).eval()
    prompt = list(range(3, 12))
    limit = 12
    texts = record_answers(shallow, [prompt], limit, drafter.layers)
    judged = replay(shallow, drafter, texts, DRAFT_DEPTH)
    forced = run_teacher_forced(shallow, drafter, Chain(DRAFT_DEPTH), Greedy(), [prompt], limit)
    # Each of its rounds accepts a whole chain and one token more.
    roots = torch.arange(0, judged.is_judged.shape[1], DRAFT_DEPTH + 1)
    counts = judged.is_judged[0, roots].sum(0)
    assert forced.mean_overlap == pytest.approx(
        (judged.overlaps[0, roots].sum(0) / counts).tolist(), abs=1e-4
    )
    assert forced.top1_agreement == pytest.approx((judged.hits[0, roots].sum(0) / counts).tolist())


def test_recorded_features_judge_as_the_target_does(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3 has the same measures whether its features are recorded or computed again."""
    torch.manual_seed(0)
    drafter = Eagle3(shallow, vocab_size=256)
    assert drafter.capabilities.drafts_from_features
    examples = [example for conversation in make_conversations(2) for example in conversation]
    recorded = measure_examples(drafter, shallow, examples)
    monkeypatch.setattr(
        drafter, "capabilities", replace(drafter.capabilities, drafts_from_features=False)
    )
    rerun = measure_examples(drafter, shallow, examples)
    assert rerun["places"] == recorded["places"] and rerun["agreement"] == recorded["agreement"]
    assert rerun["acceptance"] == pytest.approx(recorded["acceptance"], abs=2e-4)
