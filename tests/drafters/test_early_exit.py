"""LayerSkip: dropout and early-exit loss are the paper's, the target that was trained is the one
that is saved.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from spectrain.cli.main import main
from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.layers.language_model_loss import original_log_probs
from spectrain.errors import UserError
from spectrain.features.batch import Batch, collate
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.reference_model import generate
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights, save_drafter
from spectrain.runs.init_drafter import init_drafter
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain
from tests.targets import cut_tiny

VOCAB = 97
LAYERS = 5
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CURRICULA = pytest.mark.parametrize("curriculum", ["rotational", "gradual", "all"])
ADAPTATIONS: dict[str, dict[str, Any]] = {
    "full": {"adapt": "full"},
    "lora": {"adapt": "lora", "rank": 4},
    "full distilled": {"adapt": "full", "self_distillation": True},
    "lora distilled": {"adapt": "lora", "rank": 4, "self_distillation": True},
}
ADAPTED = pytest.mark.parametrize("options", list(ADAPTATIONS.values()), ids=list(ADAPTATIONS))


def make_pair(tiny: Target, tied: bool = False) -> tuple[Target, Any]:
    """Make a small random target, and the same model of transformers' own."""
    config = LlamaConfig(**SIZE, tie_word_embeddings=tied)
    reference, model = (
        AutoModelForCausalLM.from_config(config, attn_implementation=a).eval()
        for a in ("eager", "spectrain")
    )
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                1.5 * noise * parameter.shape[-1] ** -0.5
                if noise.dim() > 1
                else parameter + 0.1 * noise
            )
    model.load_state_dict(reference.state_dict())
    return Target(model, tiny.tokenizer, "random", ""), reference


def prepare_drafter(target: Target, **options: Any) -> EarlyExit:
    torch.manual_seed(3)
    drafter = EarlyExit(target, **{"rotate": 2, **options})
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    for parameter in drafter.target_training.parameters:
        parameter.requires_grad_(True)  # as the trainer does
    return drafter


def make_examples(count: int, vocab: int = VOCAB, length: int = 20) -> list[Example]:
    """Make sequences of unequal length whose later part is the assistant's."""
    source = torch.Generator().manual_seed(5)
    rows = torch.randint(3, vocab, (count, length), generator=source).tolist()
    return [
        Example(row[: length - n % 5], [i >= 8 for i in range(length - n % 5)])
        for n, row in enumerate(rows)
    ]


def make_dataset(vocab: int = VOCAB, count: int = 8) -> Dataset:
    return Dataset(make_examples(count, vocab), count, 0, 0)


def compute_logits(target: Target, tokens: Tensor) -> Tensor:
    logits = target.run(tokens, ForwardPlan(logits=True)).logits
    assert logits is not None
    return logits


# The paper's coefficients


def paper_weights(num_layers: int, scale: float, opened: set[int]) -> list[float]:
    """Compute e(l) = scale sum_{i=0}^{l} i, e(L - 1) = L - 1 + scale sum_{i=0}^{L-2} i,
    normalised (section 4.1.2).
    """
    e = [scale * sum(range(exit + 1)) for exit in range(num_layers)]
    e[-1] = num_layers - 1 + scale * sum(range(num_layers - 1))
    opened = opened | {num_layers - 1}
    return [
        e[exit] / sum(e[i] for i in opened) if exit in opened else 0.0 for exit in range(num_layers)
    ]


def make_state(step: int, num_steps: int) -> TrainingState:
    """Make the state that the trainer passes at a step."""
    return TrainingState(step, step / num_steps)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("num_layers", [2, 5, 8, 32])
@pytest.mark.parametrize("scale", [1.0, 0.2])
@pytest.mark.parametrize("step", [0, 1, 7, 30, 49, 50, 99])
def test_exit_weights_are_the_papers(
    tiny: Target, num_layers: int, scale: float, step: int
) -> None:
    """With all, rotational and gradual exits, at step t of 100, the coefficients are e C / sum e
    C and sum to 1.
    """
    cases: list[tuple[dict[str, Any], set[int]]] = [({"curriculum": "all"}, set(range(num_layers)))]
    for rotate in (1, 3, 40):
        cases.append(
            (
                {"rotate": rotate},
                {exit for exit in range(num_layers) if (exit - step) % rotate == 0},
            )
        )
    opened = {num_layers - 1}
    for later in range(1, num_layers):  # one more exit, downwards, every T / (2 L) steps
        if step >= later * 100 / (2 * num_layers):
            opened = opened | {num_layers - 1 - later}
    cases.append(({"curriculum": "gradual"}, opened))
    for options, exits in cases:
        weights = EarlyExit(tiny, exit_scale=scale, **options).exit_weights(
            num_layers, make_state(step, 100)
        )
        assert weights == pytest.approx(paper_weights(num_layers, scale, exits), rel=1e-9, abs=0)
        assert sum(weights) == pytest.approx(1) and weights[-1] > 0


@pytest.mark.parametrize("rotate", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("start", [0, 5])
def test_rotation_opens_every_exit(tiny: Target, rotate: int, start: int) -> None:
    """Over `rotate` steps in a row every exit that can count is open once, and the last at each
    of them.
    """
    times = [0] * 8
    for step in range(start, start + rotate):
        weights = EarlyExit(tiny, rotate=rotate).exit_weights(8, make_state(step, 100))
        times = [count + (weight > 0) for count, weight in zip(times, weights)]
    assert times == [0, *[1] * 6, rotate]  # e(0) is 0


@CURRICULA
@pytest.mark.parametrize("num_layers", [1, 2, 6])
def test_without_scale_only_the_last_exit_counts(
    tiny: Target, curriculum: Any, num_layers: int
) -> None:
    """With exit_scale=0 the loss is the language model's alone."""
    weights = EarlyExit(tiny, exit_scale=0.0, curriculum=curriculum).exit_weights(
        num_layers, make_state(60, 100)
    )
    assert weights == [0.0] * (num_layers - 1) + [1.0]


def test_gradual_exits_open_downwards(tiny: Target) -> None:
    """Only the last exit is open at first; exits open from above without a gap for good, all
    from half of the training on.
    """
    before: set[int] = set()
    for step in range(64):
        weights = EarlyExit(tiny, curriculum="gradual").exit_weights(8, make_state(step, 64))
        exits = {exit for exit, weight in enumerate(weights) if weight > 0}
        assert exits >= before and exits == set(range(min(exits), 8))
        assert (exits == {7}) if step == 0 else (step < 32 or exits == set(range(1, 8)))
        before = exits


@pytest.mark.sweep(8)
@pytest.mark.parametrize("num_layers", [2, 5, 8, 32])
@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("step", [0, 3, 9])
def test_dropout_rates_are_the_papers(
    tiny: Target, num_layers: int, rate: float, step: int
) -> None:
    """The rate is (exp(l ln 2 / (L - 1)) - 1) max_dropout: 0 at the first layer, max_dropout at
    the last, at every step.
    """
    rates = EarlyExit(tiny, max_dropout=rate).dropout_rates(num_layers, make_state(step, 10))
    assert rates == pytest.approx(
        [rate * (2 ** (n / (num_layers - 1)) - 1) for n in range(num_layers)], rel=1e-9, abs=1e-12
    )
    assert rates[0] == 0 and rates[-1] == pytest.approx(rate)


@pytest.mark.parametrize("num_steps", [2, 6])
def test_exponential_dropout_follows_the_training(
    tiny: Target, num_steps: int, tmp_path: Path
) -> None:
    """At step t of T the trainer's rates are exp(t ln 2 / (T - 1)) - 1 times the constant rates,
    from 0 to equal.
    """
    target, _ = make_pair(tiny)
    drafter = prepare_drafter(
        target, max_dropout=0.4, dropout_schedule="exponential", adapt="lora", rank=2
    )
    trainer = Trainer(lr=1e-4, max_steps=num_steps, batch_tokens=40)
    with patch.object(EarlyExit, "loss", autospec=True, side_effect=EarlyExit.loss) as loss:
        trainer.fit(drafter, target, make_dataset(), LiveSource(), tmp_path)
    step_rates = [drafter.dropout_rates(LAYERS, call.args[3]) for call in loss.call_args_list]
    assert len(step_rates) == num_steps
    constant = EarlyExit(target, max_dropout=0.4).dropout_rates(LAYERS, TrainingState())
    assert step_rates[0] == [0.0] * LAYERS
    for step, rates in enumerate(step_rates):
        over_time = math.exp(step * math.log(2) / (num_steps - 1)) - 1
        assert rates == pytest.approx([over_time * rate for rate in constant], abs=1e-9), step


# Which layers a sequence drops


def draw_layers(drafter: EarlyExit, target: Target, rows: list[Example], step: int = 4) -> Tensor:
    dropped = drafter.draw_dropped_layers(collate(rows), target, make_state(step, 10))
    assert dropped is not None
    return dropped


def test_a_sequence_drops_the_same_layers_however_it_is_batched(tiny: Target) -> None:
    """A sequence drops the same layers alone, padded, among others and in another order; another
    step or seed draws anew.
    """
    drafter = EarlyExit(tiny, max_dropout=0.6).train()
    rows = make_examples(40, 2000)
    full = draw_layers(drafter, tiny, rows)
    assert full.shape == (8, 40) and full.any(0).sum() > 10 and not full[0].any()
    order = torch.randperm(40)
    assert torch.equal(draw_layers(drafter, tiny, [rows[n] for n in order]), full[:, order])
    for n in range(0, 40, 7):
        assert torch.equal(draw_layers(drafter, tiny, [rows[n]]), full[:, n : n + 1])
        longer = Example(torch.randint(3, 2000, (50,)).tolist(), [True] * 50)
        assert torch.equal(draw_layers(drafter, tiny, [longer, rows[n]])[:, 1], full[:, n])
    assert torch.equal(
        draw_layers(EarlyExit(tiny, max_dropout=0.6, curriculum="all").train(), tiny, rows), full
    )
    for step, seed in ((5, 0), (4, 1)):
        assert not torch.equal(
            draw_layers(EarlyExit(tiny, max_dropout=0.6, seed=seed).train(), tiny, rows, step), full
        )


def test_nothing_is_dropped_where_it_is_not_trained(tiny: Target) -> None:
    """No layer is dropped in evaluation or at a rate of 0."""
    batch = collate(make_examples(4, 2000))
    assert (
        EarlyExit(tiny, max_dropout=0.6).eval().draw_dropped_layers(batch, tiny, make_state(4, 10))
        is None
    )
    assert (
        EarlyExit(tiny, max_dropout=0.0).train().draw_dropped_layers(batch, tiny, make_state(4, 10))
        is None
    )
    late = EarlyExit(tiny, max_dropout=0.9, dropout_schedule="exponential").train()
    first = late.draw_dropped_layers(batch, tiny, make_state(0, 10))
    assert first is not None and not first.any()


def test_layers_drop_as_often_as_their_rates(tiny: Target) -> None:
    """Counts are within five standard deviations of a binomial count, and layers drop
    independently.
    """
    drafter = EarlyExit(tiny, max_dropout=0.5).train()
    rows = make_examples(100, 2000)
    # [steps, L, B]
    many = torch.stack([draw_layers(drafter, tiny, rows, step).double() for step in range(20)])
    rates = torch.tensor(drafter.dropout_rates(8, make_state(0, 10)), dtype=torch.float64)
    for mean, count in (
        (many.mean((0, 2)), 2000),
        (many[0].mean(1), 100),
        (many[:, :, 0].mean(0), 20),
    ):
        assert ((mean - rates).abs() <= 5 * (rates * (1 - rates) / count).sqrt() + 1e-12).all()
    both = (many[:, 6] * many[:, 7]).mean()
    rate = float(rates[6] * rates[7])
    assert abs(float(both) - rate) < 5 * math.sqrt(rate * (1 - rate) / 2000)


# The loss


def reference_loss(reference: Any, batch: Batch, weights: list[float]) -> tuple[Tensor, Tensor]:
    """Compute the last exit's weighted loss, and that of the others, from transformers' hidden
    states, norm and lm_head.
    """
    outputs = reference(batch.tokens, output_hidden_states=True, use_cache=False)
    assert len(outputs.hidden_states) == len(weights) + 1
    mask = batch.loss_mask[:, 1:]
    terms = []
    for exit, weight in enumerate(weights):
        last = exit + 1 == len(weights)  # transformers' last hidden state has been through the norm
        final = (
            outputs.hidden_states[exit + 1]
            if last
            else reference.model.norm(outputs.hidden_states[exit + 1])
        )
        log_q = reference.lm_head(final)[:, :-1].log_softmax(-1)
        token_losses = -log_q.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        terms.append(weight * (token_losses * mask).sum())
    return terms[-1], torch.stack(terms[:-1]).sum()


LOSSES = [
    {"curriculum": "all"},
    {"curriculum": "all", "exit_scale": 0.2},
    {"curriculum": "rotational", "rotate": 2},
    {"curriculum": "rotational", "rotate": 3},
    {"curriculum": "gradual"},
    {"curriculum": "all", "exit_scale": 0.0},
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "options", LOSSES, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items())
)
def test_loss_is_the_sum_over_the_exits(tiny: Target, options: dict[str, Any], tied: bool) -> None:
    """The loss's terms, the gradient of every parameter, hits and counts equal those of
    transformers' own hidden states.
    """
    target, reference = make_pair(tiny, tied)
    drafter = prepare_drafter(target, max_dropout=0.0, exit_layer=2, **options).train()
    state = TrainingState(3, 0.35)
    batch = collate(make_examples(4))
    losses = drafter.loss(batch, target, state)
    last, early = reference_loss(reference, batch, drafter.exit_weights(LAYERS, state))
    assert set(losses.terms) == {"language_model", "exits"}
    torch.testing.assert_close(losses.terms["language_model"], last, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(losses.terms["exits"], early, rtol=1e-5, atol=1e-4)
    losses.total.backward()
    (last + early).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in target.model.named_parameters():
        assert parameter.grad is not None and expected[name].grad.abs().max() > 0, name
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-3, msg=name
        )
    with torch.no_grad():
        states = reference(batch.tokens, output_hidden_states=True).hidden_states
        early_best, best = (
            reference.lm_head(x).argmax(-1) for x in (reference.model.norm(states[2]), states[-1])
        )
    mask = batch.loss_mask[:, 1:]
    assert losses.hits.tolist() == [int((early_best == best)[:, :-1][mask].sum())]
    assert losses.counts.tolist() == [int(mask.sum())]


def test_loss_is_that_of_the_remaining_layers(tiny: Target) -> None:
    """With dropout, a sequence's loss is that of the model without the layers that it drops, its
    last state at every exit.
    """
    target, reference = make_pair(tiny)
    drafter = prepare_drafter(target, max_dropout=0.9, curriculum="all").train()
    state = make_state(2, 10)
    rows = make_examples(6)
    dropped = draw_layers(drafter, target, rows, step=2)
    assert dropped.any() and not dropped.all(1).any()
    weights = drafter.exit_weights(LAYERS, state)
    expected = 0.0
    with torch.no_grad():
        for row, example in enumerate(rows):
            tokens = torch.tensor([example.tokens])
            positions = [n for n in range(1, len(example.tokens)) if example.mask[n]]
            hidden = target.run(tokens, ForwardPlan(layers=(0,))).at_layer(0)
            for layer in range(LAYERS):
                if not dropped[layer, row]:
                    part = target.run(
                        tokens,
                        ForwardPlan(
                            layers=(layer + 1,),
                            span=LayerSpan(first=layer, last=layer + 1, hidden=hidden),
                        ),
                    )
                    hidden = part.at_layer(layer + 1)
                log_q = reference.lm_head(reference.model.norm(hidden))[0].log_softmax(-1)
                expected += weights[layer] * float(
                    -sum(log_q[n - 1, example.tokens[n]] for n in positions)
                )
        loss = drafter.loss(collate(rows), target, state).total
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_only_the_assistants_tokens_carry_loss(tiny: Target) -> None:
    """Without labels there is no loss; padding adds none; batches add up."""
    target, _ = make_pair(tiny)
    drafter = prepare_drafter(target, max_dropout=0.5, curriculum="all").train()
    rows = make_examples(4)
    with torch.no_grad():
        full = drafter.loss(collate(rows), target, TrainingState())
        parts = [drafter.loss(collate([row]), target, TrainingState()) for row in rows]
        padded = drafter.loss(
            collate([*rows, Example([5] * 40, [False] * 40)]), target, TrainingState()
        )
    assert float(full.total) == pytest.approx(sum(float(part.total) for part in parts), rel=1e-5)
    assert float(full.total) == pytest.approx(float(padded.total), rel=1e-5)
    assert full.counts.sum() == padded.counts.sum() == sum(sum(row.mask) for row in rows)


# Self-distillation


@pytest.mark.parametrize("adapt", ["full", "lora"])
def test_self_distillation_starts_where_there_is_nothing_to_learn(tiny: Target, adapt: Any) -> None:
    """While only the last exit is open the loss is the entropy of the original, and its gradient
    is zero.
    """
    target, reference = make_pair(tiny)
    drafter = prepare_drafter(
        target, max_dropout=0.0, curriculum="gradual", adapt=adapt, self_distillation=True
    ).train()
    batch = collate(make_examples(4))
    losses = drafter.loss(batch, target, TrainingState())
    with torch.no_grad():
        log_p = reference(batch.tokens).logits[:, :-1].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[batch.loss_mask[:, 1:]].sum()
    torch.testing.assert_close(losses.total.detach(), entropy, rtol=1e-5, atol=1e-4)
    gradients = torch.autograd.grad(
        losses.total, drafter.target_training.parameters, allow_unused=True
    )
    assert all(gradient is None or gradient.abs().max() < 1e-3 for gradient in gradients)
    plain_target = make_pair(tiny)[0]
    plain = prepare_drafter(plain_target, max_dropout=0.0, curriculum="gradual", adapt=adapt)
    total = plain.loss(batch, plain_target, TrainingState()).total
    data = torch.autograd.grad(total, plain.target_training.parameters, allow_unused=True)
    # that of the data is not
    assert max(float(gradient.abs().max()) for gradient in data if gradient is not None) > 1


@pytest.mark.parametrize("adapt", ["full", "lora"])
def test_self_distillation_asks_the_original(tiny: Target, adapt: Any) -> None:
    """However the target changes, every exit's loss is its cross-entropy from the original
    target.
    """
    target, reference = make_pair(tiny)
    drafter = prepare_drafter(
        target, max_dropout=0.0, curriculum="all", adapt=adapt, rank=4, self_distillation=True
    ).train()
    batch = collate(make_examples(4))
    with torch.no_grad():
        original = reference(batch.tokens).logits.softmax(-1)
        for parameter in drafter.target_training.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
        weights = drafter.exit_weights(LAYERS, TrainingState())
        expected = 0.0
        states = target.run(batch.tokens, ForwardPlan(layers=tuple(range(1, LAYERS + 1))))
        for exit, weight in enumerate(weights):
            log_q = target.head.logits(
                target.apply_final_norm(states.at_layer(exit + 1))
            ).log_softmax(-1)
            expected += weight * float(
                -(original * log_q).sum(-1)[:, :-1][batch.loss_mask[:, 1:]].sum()
            )
        assert float(drafter.loss(batch, target, TrainingState()).total) == pytest.approx(
            expected, rel=1e-5
        )
        assert not torch.allclose(
            compute_logits(target, batch.tokens).softmax(-1), original, atol=1e-2
        )


def compute_original_probs(drafter: EarlyExit, batch: Batch, target: Target) -> Tensor:
    """Compute the original target's probabilities [R, V], which the exits learn."""
    log_probs = original_log_probs(batch, target, drafter.target_training)
    return log_probs(slice(0, int(batch.next_is_supervised.sum()))).exp()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("adapt", ["full", "lora"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_the_original_stays_as_it_was(adapt: Any, packed: bool, tmp_path: Path) -> None:
    """Training changes the target and not, bit by bit, the distributions that it learns; the
    copy is gone afterwards.
    """
    target = cut_tiny(3)
    if packed:
        target.pack_weights()
    drafter = prepare_drafter(target, adapt=adapt, rank=4, self_distillation=True)
    batch = collate(make_examples(2, 2000))
    before = compute_logits(target, batch.tokens)
    expected = compute_original_probs(drafter, batch, target)
    torch.testing.assert_close(
        expected, before[batch.next_is_supervised].softmax(-1), rtol=1e-4, atol=1e-6
    )
    is_unchanged: list[bool] = []

    def watch(step: int) -> None:
        is_unchanged.append(torch.equal(compute_original_probs(drafter, batch, target), expected))

    Trainer(lr=1e-3, max_steps=3).fit(
        drafter, target, make_dataset(2000), LiveSource(), tmp_path, on_step=watch
    )
    assert is_unchanged == [True] * 3
    assert not torch.allclose(compute_logits(target, batch.tokens), before, atol=1e-2)
    assert (
        drafter.target_training.original is None
        and not list(drafter.parameters())
        and not drafter.state_dict()
    )


# Training


@ADAPTED
def test_only_what_was_named_is_trained(
    tiny: Target, options: dict[str, Any], tmp_path: Path
) -> None:
    """All weights, or the adapters alone, change; afterwards the target is frozen and has the
    parameters of before.
    """
    target, _ = make_pair(tiny)
    names = [name for name, _ in target.named_parameters()]
    drafter = prepare_drafter(target, max_dropout=0.3, **options)
    chosen = {id(parameter) for parameter in drafter.target_training.parameters}
    before = {name: parameter.detach().clone() for name, parameter in target.named_parameters()}
    moved: dict[str, bool] = {}

    def watch(step: int) -> None:
        for name, parameter in target.named_parameters():
            moved[name] = not torch.equal(parameter, before[name])
            assert parameter.requires_grad == (id(parameter) in chosen)

    Trainer(lr=1e-3, max_steps=4).fit(
        drafter, target, make_dataset(), LiveSource(), tmp_path, on_step=watch
    )
    assert all(moved[name] == (options["adapt"] == "full" or ".lora_" in name) for name in moved)
    assert [name for name, _ in target.named_parameters()] == names
    assert (
        not any(parameter.requires_grad for parameter in target.parameters())
        and not drafter.target_training.parameters
    )


@pytest.mark.sweep(2, free=("options",))
@ADAPTED
def test_the_finished_target_says_what_the_trained_one_said(
    tiny: Target, options: dict[str, Any], tmp_path: Path
) -> None:
    """The logits are the same with adapters on, then merged, then saved and loaded."""
    target, _ = make_pair(tiny)
    target.pack_weights()
    drafter = prepare_drafter(target, max_dropout=0.2, **options)
    tokens = torch.randint(3, VOCAB, (2, 12))
    before = compute_logits(target, tokens)
    during = []
    trainer = Trainer(lr=3e-3, max_steps=5, batch_tokens=60)
    trainer.fit(
        drafter,
        target,
        make_dataset(),
        LiveSource(),
        tmp_path / "run",
        on_step=lambda _: during.append(compute_logits(target, tokens)),
    )
    after = compute_logits(target, tokens)
    torch.testing.assert_close(after, during[-1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-2)
    target.save(tmp_path / "target")
    torch.testing.assert_close(
        compute_logits(load_hf(str(tmp_path / "target")), tokens), after, rtol=1e-5, atol=1e-5
    )


class Killed(Exception):
    """An error that stands for a kill between two steps."""


@pytest.mark.sweep(2, free=("options",))
@ADAPTED
def test_resumed_equals_uninterrupted(
    tiny: Target, options: dict[str, Any], tmp_path: Path
) -> None:
    """A run killed at step 4 of 6 and resumed from step 3, with layers dropped, ends in the same
    weights and metrics.
    """
    options = {
        "max_dropout": 0.7,
        "dropout_schedule": "exponential",
        "curriculum": "gradual",
        **options,
    }
    results = []
    for name in ("whole", "cut"):
        trainer = Trainer(lr=1e-3, max_steps=6, batch_tokens=40, log_every=1, save_every=3)
        if name == "cut":

            def kill(at: int) -> None:
                if at == 4:
                    raise Killed

            torch.manual_seed(0)
            target, _ = make_pair(tiny)
            with pytest.raises(Killed):
                trainer.fit(
                    prepare_drafter(target, **options),
                    target,
                    make_dataset(),
                    LiveSource(),
                    tmp_path / name,
                    on_step=kill,
                )
        torch.manual_seed(0)
        target, _ = make_pair(tiny)
        trainer.fit(
            prepare_drafter(target, **options),
            target,
            make_dataset(),
            LiveSource(),
            tmp_path / name,
        )
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        columns = [
            {key: line.get(key) for key in ("step", "loss", "losses", "agreement", "lr")}
            for line in lines
        ]
        results.append((target.state_dict(), columns))
    (first, metrics), (second, other_metrics) = results
    assert first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )
    assert metrics == other_metrics and [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]


@pytest.mark.sweep(1, free=("adapt",))
@pytest.mark.parametrize("adapt", ["full", "lora"])
def test_a_bfloat16_target_is_trained_in_float32(adapt: Any, tmp_path: Path) -> None:
    """Weights are float32 in training; then all are bfloat16 again, and the target's logits are
    its saved copy's.
    """
    target = load_tiny(dtype="bfloat16")
    types = {name: tensor.dtype for name, tensor in target.state_dict(keep_vars=True).items()}
    buffers = {name: buffer.clone() for name, buffer in target.named_buffers()}
    drafter = prepare_drafter(target, adapt=adapt, rank=2, rotate=4)
    assert {parameter.dtype for parameter in drafter.target_training.parameters} == {torch.float32}
    tokens = torch.randint(3, 2000, (1, 10))
    Trainer(lr=1e-3, max_steps=1, batch_tokens=20).fit(
        drafter, target, make_dataset(2000, 1), LiveSource(), tmp_path / "run"
    )
    assert (
        target.dtype == torch.bfloat16
        and {n: t.dtype for n, t in target.state_dict().items()} == types
    )
    # such as the frequencies of the rotary embedding, which stay float32
    for name, buffer in target.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name
    target.save(tmp_path / "target")
    assert torch.equal(
        compute_logits(target, tokens),
        compute_logits(load_hf(str(tmp_path / "target"), dtype="bfloat16"), tokens),
    )


# The trained target


@pytest.fixture(scope="module")
def trained_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """The tiny target after a short training on its own text, and the directory in which it is
    saved.
    """
    run = tmp_path_factory.mktemp("trained")
    target = load_tiny()
    prompts = [
        torch.randint(3, 2000, (6,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in range(4)
    ]
    answers = [
        decode(target, [prompt], Greedy(), 24, ignore_eos=True)[0].output for prompt in prompts
    ]
    rows = [Example(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers)]
    target.pack_weights()
    drafter = prepare_drafter(target, curriculum="all", exit_layer=3)
    Trainer(lr=1e-3, max_steps=30, warmup=0.0).fit(
        drafter, target, Dataset(rows, 4, 0, 0), LiveSource(), run / "run"
    )
    target.save(run / "target")
    return target, run / "target"


@pytest.mark.sweep(1, free=("exit_layer",))
@pytest.mark.parametrize("exit_layer", [1, 3, 7])
def test_transformers_decodes_the_same_with_the_same_exit(
    trained_target: tuple[Target, Path], exit_layer: int
) -> None:
    """Our early exit, transformers' from the saved directory, and its greedy decoding give the
    same tokens.
    """
    target, directory = trained_target
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    drafter = EarlyExit(target, exit_layer=exit_layer).eval()
    rounds = written = 0
    for number in range(3):
        source = torch.Generator().manual_seed(number)
        prompt = torch.randint(3, 2000, (6,), generator=source).tolist()
        ours = decode(target, [prompt], Greedy(), 16, drafter, Chain(3))[0]
        for options in ({}, {"assistant_early_exit": exit_layer}):
            assert generate(model, prompt, 16, target.stop_ids, **options) == ours.output
        rounds = rounds + len(ours.round_lengths)
        written = written + sum(ours.round_lengths)
    # the last exit but one agrees with the last
    assert written > 20 and (written > rounds or exit_layer < 7)


def test_another_exit_is_the_same_drafter(tiny: Target) -> None:
    """at_exit changes the exit and nothing else; an exit that does not exist is refused."""
    drafter = EarlyExit(tiny, exit_layer=2)
    other = drafter.at_exit(5, tiny)
    assert (drafter.exit_layer, other.exit_layer) == (2, 5)
    assert {k: v for k, v in vars(other).items() if k != "exit_layer"}.keys() == {
        k for k in vars(drafter) if k != "exit_layer"
    } and other.head is drafter.head
    for wrong in (0, 8, -1):
        with pytest.raises(UserError, match=f"drafter.exit_layer={wrong}"):
            drafter.at_exit(wrong, tiny)


def save_exit_drafter(tiny: Target, directory: Path, **options: Any) -> Any:
    """Save a drafter in `directory` and return its configuration."""
    config = OmegaConf.create(
        {"drafter": {"_target_": "spectrain.drafters.early_exit.EarlyExit", **options}}
    )
    save_drafter(directory, EarlyExit(tiny, **options), RunSpec.from_nodes(config))
    return config


def test_a_saved_drafter_names_its_exit(tiny: Target, tmp_path: Path) -> None:
    """The description has the exit that the default chose, and builds the same drafter; there
    are no weights.
    """
    save_exit_drafter(tiny, tmp_path / "drafter", max_dropout=0.3)
    described = json.loads((tmp_path / "drafter/config.json").read_text())["drafter"]
    reloaded: EarlyExit = GroupSpec.from_saved("drafter", described, "").build(target=tiny)
    load_weights(reloaded, tmp_path / "drafter")
    assert (
        described["exit_layer"] == reloaded.exit_layer == EarlyExit(tiny).exit_layer == 2
        and reloaded.max_dropout == 0.3
    )
    assert not list(reloaded.parameters())


def test_init_is_refused(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """drafter.init has no weights to load; the message names what to write instead, and the
    command exits with 2.
    """
    save_exit_drafter(tiny, tmp_path / "drafter", exit_layer=2)
    config = save_exit_drafter(tiny, tmp_path / "other", adapt="lora")
    config = OmegaConf.merge(
        config, {"drafter": {"init": str(tmp_path / "drafter")}, "trainer": {}}
    )
    with pytest.raises(UserError, match="target=hf target.model=RUN/target"):
        init_drafter(RunSpec.from_nodes(config), load_tiny(), make_dataset(2000))  # type: ignore[arg-type]
    run = tmp_path / "run"
    settings = [
        "target=tiny",
        "recipe=layerskip",
        "data.limit=4",
        "data.max_length=32",
        "eval=none",
        "trainer.max_steps=1",
    ]
    monkeypatch.setattr(
        sys, "argv", ["spectrain", "train", *settings, f"drafter.init={tmp_path}", f"run={run}"]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert (
        end.value.code == 2
        and "target=hf target.model=RUN/target" in capsys.readouterr().err
        and not run.exists()
    )


WRONG = [
    ({"max_dropout": 1.0}, "drafter.max_dropout=1.0"),
    ({"max_dropout": -0.1}, "drafter.max_dropout=-0.1"),
    ({"exit_scale": -1.0}, "drafter.exit_scale=-1.0"),
    ({"exit_scale": math.nan}, "drafter.exit_scale=nan"),
    ({"rotate": 0}, "drafter.rotate=0"),
    ({"rank": 0}, "drafter.rank=0"),
    ({"exit_layer": 8}, "use 1 to 7"),
    ({"exit_layer": 0}, "use 1 to 7"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_settings_are_named(tiny: Target, options: dict[str, Any], message: str) -> None:
    """A setting out of range is refused with what to write."""
    with pytest.raises(UserError, match=message):
        GroupSpec("drafter", "early_exit", options).build(target=tiny)


def test_dropout_changes_the_loss_in_training_only(tiny: Target) -> None:
    """In evaluation the loss is that without dropout."""
    target, _ = make_pair(tiny)
    drafter = prepare_drafter(target, max_dropout=0.9, curriculum="all")
    batch = collate(make_examples(4))
    plain = prepare_drafter(target, max_dropout=0.0, curriculum="all")
    with torch.no_grad():
        none = float(plain.train().loss(batch, target, TrainingState()).total)
        on, off = (
            float(drafter.train(mode).loss(batch, target, TrainingState()).total)
            for mode in (True, False)
        )
    assert off == none != on
