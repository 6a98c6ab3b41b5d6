"""MTP: training and decoding compute the same states, and both read the state after the target's
final norm.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.state_rollout import StateRollout
from spectrain.drafters.mtp import Mtp
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from tests.decoding.rounds import Keeping
from tests.models.architectures import save_small

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next", "mellum", "gemma2", "gpt_oss")
"""Latent attention; experts; norms of 1 + w and layers that keep a state; windows; softcaps;
sinks.
"""


def make_dataset() -> Dataset:
    rows = torch.randint(3, 90, (3, 24)).tolist()
    return Dataset(
        [
            Example(row[: 24 - 5 * n], [i >= 6 for i in range(24 - 5 * n)])
            for n, row in enumerate(rows)
        ],
        3,
        0,
        0,
    )


def make_drafter(target: Target, **options: object) -> Mtp:
    """Make a drafter whose every parameter is random, norms included."""
    torch.manual_seed(1)
    drafter = Mtp(target, start="new", **options)  # type: ignore[arg-type]
    for parameter in drafter.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = (
            1.5 * noise * parameter.shape[-1] ** -0.5
            if noise.dim() > 1
            else parameter.data + 0.1 * noise
        )
    return drafter.eval()


@pytest.fixture(scope="module", params=["tiny", *KINDS])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    if request.param == "tiny":
        shallow: Target = request.getfixturevalue("shallow")
        return shallow
    folder = tmp_path_factory.mktemp(request.param)
    save_small(request.param, folder)
    load_tokenizer(str(TINY_DIRECTORY), False, True).save_pretrained(folder)
    return load_hf(str(folder))


def unroll_training(drafter: Mtp, target: Target, tokens: Tensor, num_steps: int) -> list[Tensor]:
    """Return the states [1, T, D] of every training step, computed from the target's features."""
    batch = LiveSource().make_batch(
        BatchRequest(
            [Example(tokens[0].tolist(), [True] * tokens.shape[1])], target, drafter.layers
        )
    )
    assert batch.features is not None
    hidden = batch.features.at_layer("final")
    own_states = []
    states = []
    for step in range(num_steps):
        hidden, own = drafter.run_step(batch, hidden, step, own_states[:])
        own_states.append(own)
        states.append(hidden)
    return states


@torch.no_grad()
def test_training_unroll_equals_decoding(target: Target) -> None:
    """The states of the unrolled training forward equal those of drafting the same tokens, step
    by step.
    """
    drafter = make_drafter(target)
    tokens = torch.randint(3, 90, (1, 18))
    states = unroll_training(drafter, target, tokens, 3)
    final = target.features(tokens, ("final",)).at_layer("final")
    for t in (2, 6, 12):  # beyond windows of 8 too
        cache = TreeCache(1, 1, 26, "cpu")
        output = drafter.run(
            tokens[:, 1 : t + 2], final[:, : t + 1], torch.arange(t + 1)[None], cache, None
        )
        cache.commit(None, torch.tensor([t + 1]))
        rollout = StateRollout(drafter, cache, output[:, -1:])
        for step in range(1, 3):
            rollout.extend(tokens[:, t + 1 + step][None], torch.tensor([[step - 1]]))
        for step in range(3):
            torch.testing.assert_close(
                rollout.hidden[0, step], states[step][0, t], rtol=1e-3, atol=1e-3
            )


@pytest.mark.sweep(3, free=("target",))
@torch.no_grad()
def test_every_round_drafts_what_training_unrolls(target: Target) -> None:
    """In every round a chain's drafts are the likeliest tokens of the training forward over the
    text so far, and the output is greedy."""
    drafter = make_drafter(target)
    recorder = Keeping(Chain(2))
    prompt = torch.randint(3, 90, (9,)).tolist()
    generation = decode(target, [prompt], Greedy(), 6, drafter, recorder, ignore_eos=True)[0]
    assert generation.output == decode(target, [prompt], Greedy(), 6, ignore_eos=True)[0].output
    assert (
        generation.output
        == decode(target, [prompt], Greedy(), 6, drafter, Eagle2(2, 6, 3), ignore_eos=True)[
            0
        ].output
    )
    for texts, tree in zip(recorder.texts, recorder.trees):
        text = list(texts[0])
        for step in range(2):
            drafted = tree.tokens[0, 1 : 1 + step].tolist()
            states = unroll_training(
                drafter, target, torch.tensor([[*text, *drafted, 3]]), step + 1
            )
            best = target.head.logits(states[step][0, len(text) - 2]).argmax()
            assert int(best) == int(tree.tokens[0, 1 + step])


@torch.no_grad()
def test_the_first_state_is_that_after_the_final_norm(target: Target) -> None:
    """What training and decoding read as "final" is what the target's output layer reads: its
    logits are the target's own.

    And the output that is read in the next step is what the head reads in this one.
    """
    drafter = make_drafter(target)
    tokens = torch.randint(3, 90, (1, 12))
    output = target.run(tokens, ForwardPlan(layers=("final",), logits=True))
    assert drafter.layers == ("final",) and output.logits is not None
    torch.testing.assert_close(target.head.logits(output.at_layer("final")), output.logits)
    states = unroll_training(drafter, target, tokens, 1)
    rollout = StateRollout(drafter, TreeCache(1, 1, 4, "cpu"), states[0][:, 5:6])
    torch.testing.assert_close(rollout.start(), target.head.logits(rollout.hidden).log_softmax(-1))


@pytest.mark.sweep(3, free=("target",))
@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy", "lk_hybrid"])
def test_loss_does_not_depend_on_batching(target: Target, loss: str) -> None:
    """Loss, gradients, hits and counts of a padded batch, of a packed one, and of documents one
    by one are the same.
    """
    dataset = make_dataset()
    results = []
    for shares, packed in (([[0, 1, 2]], False), ([[0, 1, 2]], True), ([[0], [1], [2]], False)):
        drafter = make_drafter(target, loss=loss)
        total = torch.zeros(())
        hits = torch.zeros(3)
        counts = torch.zeros(3)
        for share in shares:
            batch = LiveSource().make_batch(
                BatchRequest(dataset[share], target, drafter.layers, packed=packed)
            )
            losses = drafter.loss(batch, target, TrainingState())
            losses.total.backward()
            total = total + losses.total.detach()
            hits = hits + losses.hits
            counts = counts + losses.counts
        gradient = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
        results.append((total, gradient, hits, counts))
    for other in results[1:]:
        for left, right in zip(results[0], other):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)


def test_steps_are_weighted_as_in_fastmtp(shallow: Target) -> None:
    """The loss is sum_k beta^k L_k / sum_k beta^k, where L_k is the cross-entropy of step k
    alone, written out.
    """
    drafter = make_drafter(shallow, loss="cross_entropy", step_decay=0.6)
    batch = LiveSource().make_batch(BatchRequest(make_dataset()[[0]], shallow, drafter.layers))
    tokens = batch.tokens[0]
    mask = batch.loss_mask[0]
    states = unroll_training(drafter, shallow, batch.tokens, 3)
    expected = torch.zeros(())
    for k, state in enumerate(states):
        rows = [t for t in range(len(tokens) - 2 - k) if mask[t + 2 + k]]
        logits = shallow.head.logits(state[0, rows])
        labels = tokens[[t + 2 + k for t in rows]]
        expected = expected + 0.6**k / 1.96 * torch.nn.functional.cross_entropy(
            logits, labels, reduction="sum"
        )
    torch.testing.assert_close(drafter.loss(batch, shallow, TrainingState()).total, expected)


def test_gradients_flow_through_the_unroll(shallow: Target) -> None:
    """The last step's loss has a gradient at the first state, so that state is not detached."""
    drafter = make_drafter(shallow)
    batch = LiveSource().make_batch(BatchRequest(make_dataset()[[0]], shallow, drafter.layers))
    assert batch.features is not None
    features = replace(batch.features, hidden=batch.features.hidden.clone().requires_grad_())
    hidden = features.at_layer("final")
    own_states = []
    for step in range(2):
        hidden, own = drafter.run_step(batch, hidden, step, own_states[:])
        own_states.append(own)
    assert torch.autograd.grad(hidden[0, 7].sum(), features.hidden)[0].norm() > 0


def test_a_new_layer_starts_as_the_target_says(shallow: Target) -> None:
    """At first the projection M passes on the normed state, and the norm is the target's final
    norm.
    """
    drafter = Mtp(shallow)
    drafter.prepare(shallow, torch.ones(shallow.head.vocab_size))
    hidden = torch.randn(1, 4, shallow.width)
    torch.testing.assert_close(
        drafter.inputs(torch.tensor([[5, 6, 7, 8]]), hidden), drafter.hnorm(hidden)
    )
    assert torch.equal(drafter.block.norm.weight, shallow.decoder.norm.weight)
    assert drafter.is_new_layer


def test_what_is_not_there_is_refused(shallow: Target, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="holds no MTP layer of a known layout; use drafter.start=new"
    ):
        Mtp(shallow, start="shipped")
    with pytest.raises(UserError, match="num_steps"):
        GroupSpec("drafter", "mtp", {"num_steps": 0}).build(target=shallow)
