"""EAGLE-3: what is trained is what is decoded, and losses do not depend on batching."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.llama_layer import NormedAttention, apply_rotary
from spectrain.drafters.layers.state_rollout import StateRollout
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.decoding.rounds import Keeping


def make_examples() -> Dataset:
    """Make sequences of unequal length, supervised in two separate spans."""
    rows = torch.randint(3, 2000, (4, 30)).tolist()
    examples = []
    for number, row in enumerate(rows):
        length = 30 - 5 * number
        examples.append(Example(row[:length], [6 <= i < 11 or 15 <= i < 22 for i in range(length)]))
    return Dataset(examples, 4, 0, 0)


def make_drafter(tiny: Target, **options: object) -> Eagle3:
    torch.manual_seed(1)
    drafter = Eagle3(tiny, **{"ttt_steps": 3, "vocab_size": 512, **options})  # type: ignore[arg-type]
    drafter.prepare(tiny, torch.randint(0, 1000, (tiny.head.vocab_size,)))
    return drafter


def make_batch(dataset: Dataset, indices: list[int], tiny: Target, drafter: Eagle3) -> Batch:
    return LiveSource().make_batch(BatchRequest(dataset[indices], tiny, drafter.layers))


def collect_gradients(drafter: Eagle3) -> Tensor:
    return torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss", ["forward_kl", "lk_hybrid"])
def test_loss_and_gradient_do_not_depend_on_batching(tiny: Target, loss: str) -> None:
    """One padded batch of four gives the loss, the gradient and the counts of four batches of
    one.
    """
    dataset = make_examples()
    results = []
    for shares in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        drafter = make_drafter(tiny, loss=loss)
        total = torch.zeros(())
        hits = torch.zeros(3)
        counts = torch.zeros(3)
        for share in shares:
            losses = drafter.loss(make_batch(dataset, share, tiny, drafter), tiny, TrainingState())
            losses.total.backward()
            total = total + losses.total.detach()
            hits = hits + losses.hits
            counts = counts + losses.counts
        results.append((total, collect_gradients(drafter), hits, counts))
    for left, right in zip(*results):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [None, 16])
def test_a_frozen_output_layer_is_not_trained(tiny: Target, rank: int | None) -> None:
    """All other weights get the gradients that they get beside a trained output layer; a random
    one may not be frozen.
    """
    gradients = []
    for frozen in (False, True):
        drafter = make_drafter(tiny, head_rank=rank, freeze_output=frozen)
        batch = make_batch(make_examples(), [0, 1], tiny, drafter)
        drafter.loss(batch, tiny, TrainingState()).total.backward()
        gradients.append(
            {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
        )
    trained, others = gradients
    left_out = {name for name in trained if name.startswith(("lm_head", "lm_down"))}
    assert (
        len(left_out) == (1 if rank is None else 2) and others.keys() == trained.keys() - left_out
    )
    for name, gradient in others.items():
        torch.testing.assert_close(gradient, trained[name])
    with pytest.raises(UserError, match="freeze_output=true: a random output layer must learn"):
        make_drafter(tiny, start="random", freeze_output=True)


def test_supervised_positions_are_those_whose_prediction_is_the_assistants(tiny: Target) -> None:
    """Index t at step i is supervised exactly where token t + 2 + i is the assistant's; the
    padded tail never is.
    """
    dataset = make_examples()
    drafter = make_drafter(tiny)
    batch = make_batch(dataset, [0, 1, 2, 3], tiny, drafter)
    supervision = Supervision(drafter, batch)
    for step in range(3):
        rows = supervision.is_supervised(step)
        for b, example in enumerate(dataset.examples):
            for t in range(batch.tokens.shape[1]):
                predicted = t + 2 + step
                expected = predicted < len(example.tokens) and example.mask[predicted]
                assert bool(rows[b, t]) == expected


def test_supervision_judges_the_predicted_token(tiny: Target) -> None:
    """Step i at index t is compared with the unmodified target's distribution after token t + 1
    + i.
    """
    dataset = make_examples()
    drafter = make_drafter(tiny)
    batch = make_batch(dataset, [0, 1], tiny, drafter)
    logits = tiny.run(batch.tokens, ForwardPlan(logits=True)).logits
    assert logits is not None
    supervision = Supervision(drafter, batch)
    for step in range(3):
        assert supervision.target_log_probs is not None
        rows = supervision.label_index(step)
        log_p = supervision.target_log_probs.select_rows(rows)(slice(None))
        best = supervision.labels[rows]
        after = [
            logits[b, t + 1 + step] for b, t in supervision.is_supervised(step).nonzero().tolist()
        ]
        expected = torch.stack(after)
        assert torch.equal(best, expected.argmax(-1))
        torch.testing.assert_close(
            log_p, expected[:, drafter.draft_ids].log_softmax(-1), rtol=1e-4, atol=1e-4
        )


SPECULATORS = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "norm_output": True,
    "own_embedding": True,
}
OWN_SHAPE = {
    "fc_norm": True,
    "num_attention_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "speculators": {"architecture": SPECULATORS},
    "own shape": {"architecture": OWN_SHAPE},
    "head norms": {"architecture": {"qk_norm": True}},
    "two layers": {"num_layers": 2},
    "window": {"window": 5},
    "all of it": {
        "num_layers": 3,
        "window": 4,
        "architecture": {"qk_norm": True, "norm_before_residual": True},
    },
}
VARIANT = pytest.mark.parametrize("variant", list(VARIANTS))


def make_noisy_drafter(tiny: Target, variant: str) -> Eagle3:
    """Make a drafter whose norms and layers matter."""
    drafter = make_drafter(tiny, **VARIANTS[variant]).eval()
    for module in drafter.modules():
        if isinstance(module, torch.nn.RMSNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                module.weight.add_(torch.randn_like(module.weight) / module.weight.shape[-1] ** 0.5)
    return drafter


@torch.no_grad()
def draft_by_formula(drafter: Eagle3, target: Target, text: list[int], depth: int) -> list[int]:
    """Draft a chain after a text whose last token is not run: the full text again for each token,
    every score of every layer written out."""
    fused = target.features(torch.tensor([text[:-1]]), drafter.layers).fuse_layers(
        drafter.fused_layers
    )[0]
    if drafter.input_norm is not None:
        fused = drafter.input_norm(fused)
    if drafter.fc_norm is not None:
        fused = torch.cat(
            [
                norm(part)
                for norm, part in zip(drafter.fc_norm, fused.chunk(len(drafter.fc_norm), -1))
            ],
            -1,
        )
    hidden = drafter.fc(fused)
    tokens = text[1:]
    drafts = []
    embed = drafter.head.embedding if drafter.embed_tokens is None else drafter.embed_tokens
    for _ in range(depth):
        state = hidden
        for number, layer in enumerate([drafter, *drafter.later]):
            x = layer.input_layernorm(state if number else embed(torch.tensor(tokens)))
            if number == 0:
                normed = drafter.hidden_norm(state)
                x = torch.cat([x, normed], dim=-1)
                state = normed if drafter.norm_before_residual else state
            state = state + attended_plainly(layer.self_attn, x, drafter)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        last = drafter.norm(state[-1])
        drafts.append(int(drafter.draft_ids[drafter.lm_head(last).argmax()]))
        hidden = torch.cat([hidden, (last if drafter.norm_output else state[-1])[None]])
        tokens = [*tokens, drafts[-1]]
    return drafts


def attended_plainly(attention: Any, x: Tensor, drafter: Any) -> Tensor:
    """Compute causal attention over x [T, ..], one head and token at a time, through the
    drafter's window.
    """
    q, k, v = (
        part(x).unflatten(-1, (-1, attention.head_dim))
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if isinstance(attention, NormedAttention):
        q = attention.q_norm(q)
        k = attention.k_norm(k)
    rope = drafter.rotary(x, torch.arange(len(x))[None])
    q, k = (apply_rotary(part.transpose(0, 1)[None], rope)[0].transpose(0, 1) for part in (q, k))
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(len(x)):
        first = 0 if drafter.window is None else max(0, t + 1 - drafter.window)
        for head in range(q.shape[1]):
            scores = k[first : t + 1, head // group] @ q[t, head] / math.sqrt(attention.head_dim)
            out[t, head] = scores.softmax(0) @ v[first : t + 1, head // group]
    return attention.o_proj(out.flatten(1))


@VARIANT
def test_drafts_are_those_of_the_plain_formulas(variant: str, shallow: Target) -> None:
    """In every round, of every row, a chain's drafts are the most likely tokens by the layers
    written out; output is greedy.
    """
    drafter = make_noisy_drafter(shallow, variant)
    recorder = Keeping(Chain(3))
    prompts = [torch.randint(3, 2000, (length,)).tolist() for length in (9, 3)]
    generations = decode(shallow, prompts, Greedy(), 8, drafter, recorder, ignore_eos=True)
    plain = decode(shallow, prompts, Greedy(), 8, ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in plain
    ]
    assert len(recorder.trees) > 3
    for texts, tree in list(zip(recorder.texts, recorder.trees))[::3]:
        for row, text in enumerate(texts):
            assert tree.tokens[row, 1:].tolist() == draft_by_formula(drafter, shallow, text, 3)


@pytest.mark.parametrize("variant", ["two layers", "window", "all of it"])
def test_packed_equals_padded(variant: str, tiny: Target) -> None:
    """Documents in one row have the loss, the hits and the gradient of documents in rows of
    their own.
    """
    results = []
    for packed in (False, True):
        drafter = make_noisy_drafter(tiny, variant)
        batch = LiveSource().make_batch(
            BatchRequest(make_examples()[[0, 1, 2, 3]], tiny, drafter.layers, packed=packed)
        )
        losses = drafter.loss(batch, tiny, TrainingState())
        losses.total.backward()
        results.append(
            (losses.total.detach(), collect_gradients(drafter), losses.hits, losses.counts)
        )
    for left, right in zip(*results):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_a_single_layer_keeps_its_names(tiny: Target) -> None:
    """Drafters that were saved with one layer still load; a second layer's tensors have names of
    their own.
    """
    single, double = (set(make_drafter(tiny, num_layers=count).state_dict()) for count in (1, 2))
    assert {
        "self_attn.q_proj.weight",
        "mlp.up_proj.weight",
        "hidden_norm.weight",
        "input_layernorm.weight",
    } <= single
    assert not any("later" in name for name in single) and single < double
    assert all(name.startswith("later.0.") for name in double - single)


@VARIANT
def test_training_unroll_equals_decoding(
    variant: str, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden states of the unrolled training forward are those of drafting the same tokens."""
    dataset = make_examples()
    drafter = make_noisy_drafter(tiny, variant)
    batch = make_batch(dataset, [0], tiny, drafter)
    assert batch.features is not None
    training_states: list[Tensor] = []
    judge = drafter.judge_steps
    monkeypatch.setattr(
        drafter,
        "judge_steps",
        lambda supervision, states: (training_states.extend(states), judge(supervision, states))[1],
    )
    fully_supervised = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    drafter.loss(fully_supervised, tiny, TrainingState())
    length = batch.tokens.shape[1]
    for t in (4, 9, 17):
        cache = TreeCache(drafter.num_layers, 1, length + 8, "cpu")
        hidden = drafter.fuse_features(batch.features)[:, : t + 1]
        causal = torch.ones(1, t + 1, t + 1, dtype=torch.bool).tril()
        output = drafter.run(
            batch.tokens[:, 1 : t + 2], hidden, torch.arange(t + 1)[None], cache, causal
        )
        cache.commit(torch.arange(t + 1)[None], torch.tensor([t + 1]))
        rollout = StateRollout(drafter, cache, output[:, -1:], drafter.draft_ids)
        for step in range(1, 3):
            rollout.extend(batch.tokens[:, t + 1 + step][None], torch.tensor([[step - 1]]))
        for step in range(3):
            # with every token supervised, row t of step i is index t: the first prediction is made
            # at index 0
            torch.testing.assert_close(
                rollout.hidden[0, step], training_states[step][t], rtol=1e-3, atol=1e-3
            )


def test_token_outside_the_draft_vocabulary_is_a_miss(tiny: Target) -> None:
    """Agreement is judged against the target's best token of its full vocabulary, over every
    supervised token.
    """
    dataset = make_examples()
    drafter = make_drafter(tiny, vocab_size=16)
    batch = make_batch(dataset, [0], tiny, drafter)
    losses = drafter.loss(batch, tiny, TrainingState())
    supervision = Supervision(drafter, batch)
    inside = drafter.t2d[supervision.labels[supervision.label_index(0)]]
    assert (
        losses.counts[0] == int(supervision.is_supervised(0).sum())
        and losses.hits[0] <= inside.sum() < losses.counts[0]
    )


def test_draft_vocabulary_is_the_most_used_tokens_as_sorted_offsets(tiny: Target) -> None:
    """d2t holds offsets: draft id + d2t[draft id] is the target id, ascending; t2d marks the
    same ids.
    """
    drafter = Eagle3(tiny, vocab_size=8)
    counts = torch.zeros(tiny.head.vocab_size, dtype=torch.int64)
    used = [7, 900, 31, 1200, 55, 2, 640, 1999]
    counts[used] = torch.arange(1, 9)
    drafter.prepare(tiny, counts)
    assert drafter.draft_ids.tolist() == sorted(used)
    assert drafter.t2d.nonzero().flatten().tolist() == sorted(used)
    assert drafter.d2t.tolist() == [
        target_id - draft_id for draft_id, target_id in enumerate(sorted(used))
    ]


def test_feature_layers_are_the_papers(tiny: Target) -> None:
    """The layers are 2, L/2 and L - 3, sorted and without duplicates; other layers can be named."""
    assert make_drafter(tiny).fused_layers == (2, tiny.num_layers // 2, tiny.num_layers - 3)
    assert Eagle3(tiny, layers=[5, 1, 5]).layers == (1, 5, "final")


def test_heads_attend_to_their_own_position_at_the_start(tiny: Target) -> None:
    """Half of the query heads score their own position of normed inputs highest; with
    start=random they do not.
    """
    inputs = torch.randn(24, 2 * tiny.width)
    is_own = []
    for start in ("target", "random"):
        attention = make_drafter(tiny, start=start).self_attn
        queries, keys = (
            layer(inputs).unflatten(-1, (-1, attention.head_dim))
            for layer in (attention.q_proj, attention.k_proj)
        )
        shared = queries.unflatten(1, (keys.shape[1], -1))[:, :, 0]
        is_own.append(torch.einsum("qkd,pkd->kqp", shared, keys).argmax(-1) == torch.arange(24))
    assert is_own[0].all() and not is_own[1].all()


def test_gradient_flows_through_the_unroll(tiny: Target) -> None:
    """The last step alone sends a gradient to fc, which only the first step reads: hidden states
    are not detached.
    """
    dataset = make_examples()
    drafter = make_drafter(tiny, step_decay=0.0)
    losses = drafter.loss(make_batch(dataset, [0], tiny, drafter), tiny, TrainingState())
    first = torch.autograd.grad(losses.total, drafter.fc.weight)[0]
    deeper = make_drafter(tiny, step_decay=2.0)
    weighted = torch.autograd.grad(
        deeper.loss(make_batch(dataset, [0], tiny, deeper), tiny, TrainingState()).total,
        deeper.fc.weight,
    )[0]
    assert not torch.allclose(first, weighted)
