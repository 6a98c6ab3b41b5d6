"""A judge that reads the state of a radio channel: its best weights, its draws, and what a worse
channel accepts.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.features.batch import collate
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.lossy_rules.channel import draw_round_costs, log_exchange_cost
from spectrain_research.lossy_rules.judge import Judge
from spectrain_research.lossy_rules.judge_drafter import DraftJudge
from tests.targets import cut_tiny

from .test_draft_judge import PROMPTS, make_examples


@pytest.fixture(scope="module")
def target() -> Target:
    return cut_tiny(3)


def save_probe(folder: Path, width: int, channel: float | None) -> str:
    """Save a judge with random weights on states, which reads a channel if `channel` is given."""
    folder.mkdir(parents=True)
    weight = torch.randn(1, width, generator=torch.Generator().manual_seed(3)) / width**0.5
    tensors = {"probe.weight": weight, "probe.bias": torch.zeros(1)}
    if channel is not None:
        tensors["channel"] = torch.tensor([channel])
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_an_exchange_takes_time_in_inverse_proportion_to_the_capacity() -> None:
    """log2(1 + SNR) is 1 at a ratio of 1 and 2 at a ratio of 3; at 10, the reference, c is 0."""
    costs = log_exchange_cost(torch.tensor([1.0, 3.0, 10.0])).exp()
    assert costs[0] / costs[1] == pytest.approx(2)
    assert costs[2] == pytest.approx(1)


def test_the_channel_fades_by_an_exponential_power() -> None:
    """The mean of the drawn ratios is the given one, their squares have twice its square, and a
    round has one channel whatever the batch.
    """
    positions = torch.arange(20_000)
    rows = torch.zeros_like(positions)
    costs = draw_round_costs(5.0, 0, rows, positions).double()
    ratios = torch.expm1((torch.log1p(torch.tensor(10.0).double()).log() - costs).exp())
    mean = 10**0.5
    assert ratios.mean() == pytest.approx(mean, rel=0.03)
    assert ratios.square().mean() == pytest.approx(2 * mean**2, rel=0.06)
    assert torch.equal(draw_round_costs(5.0, 0, rows[7:8], positions[7:8]), costs[7:8].float())
    assert not torch.equal(draw_round_costs(5.0, 1, rows, positions), costs.float())


@pytest.mark.parametrize("wrong_weight", [1.0, 3.0])
def test_the_best_weights_shift_the_judge_by_the_cost_of_an_exchange(
    target: Target, wrong_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With P(right) = 0.3 at every state, the loss is smallest where the logit is log(P / (1 - P))
    - log wrong_weight + c: its gradient is 0 there, over many draws of the channel."""
    judge = DraftJudge(target, wrong_weight=wrong_weight, channel=True)
    right = torch.arange(1000) % 10 < 3
    costs = torch.linspace(-1.0, 2.0, 100).repeat_interleave(10)
    judged = torch.zeros(1000, target.width), right, torch.ones(1000)
    monkeypatch.setattr(judge, "judge_alternatives", lambda *arguments: judged)
    monkeypatch.setattr(judge, "draw_channel_costs", lambda *arguments: costs)
    assert judge.channel is not None
    with torch.no_grad():
        judge.channel.fill_(1.0)
        judge.probe.bias.fill_(
            float(torch.logit(torch.tensor(0.3)) - torch.tensor(wrong_weight).log())
        )
    batch = collate(make_examples(target)[:1])
    judge.loss(batch, target, TrainingState()).total.backward()
    assert judge.channel.grad is not None and judge.probe.bias.grad is not None
    assert abs(float(judge.channel.grad)) < 1e-3 and abs(float(judge.probe.bias.grad)) < 1e-3
    judge.zero_grad()
    with torch.no_grad():
        judge.channel.zero_()
    judge.loss(batch, target, TrainingState()).total.backward()
    assert float(judge.channel.grad) < -1


def test_each_text_has_its_channel_however_it_is_batched(target: Target) -> None:
    """The loss of texts together, padded or packed, is the sum of their losses alone."""
    judge = DraftJudge(target, window=2, places=4, channel=True)
    examples = make_examples(target)[:2]
    assert judge.channel is not None
    with torch.no_grad():
        judge.probe.weight.normal_(std=target.width**-0.5)
        judge.channel.fill_(0.7)
    losses = []
    for batch in (
        collate(examples),
        collate(examples, packed=True),
        collate(examples[:1]),
        collate(examples[1:]),
    ):
        features = target.features(batch.tokens, ("final",), batch.lengths)
        losses.append(
            judge.loss(replace(batch, features=features), target, TrainingState()).total.item()
        )
    assert losses[0] == pytest.approx(losses[2] + losses[3], rel=1e-4)
    assert losses[1] == pytest.approx(losses[2] + losses[3], rel=1e-4)


def test_a_worse_channel_accepts_more(target: Target, tmp_path: Path) -> None:
    """In the worst channel all drafts stay, in the best only those of greedy decoding; captured
    rounds have the same channels.
    """
    path = save_probe(tmp_path / "judge", target.width, 50.0)
    drafter = Eagle3(target, vocab_size=512)
    drafter.prepare(target, torch.ones(target.head.vocab_size, dtype=torch.int64))
    drafter.eval()
    greedy = decode(target, PROMPTS, Greedy(), 12, drafter, Chain(3))
    best, worst = (
        decode(target, PROMPTS, Judge(path, 0.5, snr_db), 12, drafter, Chain(3))
        for snr_db in (90.0, -90.0)
    )
    assert [run.output for run in best] == [run.output for run in greedy]
    assert all(
        count == depth + 1
        for run in worst
        for count, depth in zip(run.complete_round_lengths, run.depths)
    )
    rule = Judge(path, 0.5, 10.0, seed=2)
    eager = decode(target, PROMPTS, rule, 12, drafter, Chain(3))
    captured = CapturedRunner(target, rule, drafter, Chain(3)).decode(PROMPTS, 12)
    assert [run.output for run in captured] == [run.output for run in eager]


def test_a_judge_without_a_channel_is_refused(target: Target, tmp_path: Path) -> None:
    path = save_probe(tmp_path / "judge", target.width, None)
    with pytest.raises(UserError, match=r"^acceptance\.snr_db=5\.0: the judge in .* does not read"):
        Judge(path, snr_db=5.0)
    with pytest.raises(UserError, match=r"^acceptance\.snr_db=500\.0: use decibels"):
        Judge(path, snr_db=500.0)
