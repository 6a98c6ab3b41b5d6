"""Transformer heads: each is transformers' own decoder layer over the target's states, in
training as in decoding.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.llama_layer import llama_config
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.training.checkpoints import select_trained_groups
from spectrain_research.transformer_heads.drafter import TransformerHeads
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe, shaken, walk
from tests.targets import cut_tiny

HEADS = 3


def make_drafter(target: Target, **options: Any) -> TransformerHeads:
    return shaken(
        TransformerHeads(target, **{"num_heads": HEADS, "vocab_size": 512, **options}), target
    )  # type: ignore[no-any-return]


@torch.no_grad()
def reference_log_probs(drafter: TransformerHeads, target: Target, tokens: Tensor) -> Tensor:
    """Return [K, B, T, V] the log softmax of W f_k over the target's states, for every head f_k
    by transformers' layer.
    """
    config = llama_config(target)
    config._attn_implementation = "eager"
    final = target.features(tokens, ("final",)).at_layer("final")
    length = tokens.shape[1]
    positions = torch.arange(length)[None]
    rope = LlamaRotaryEmbedding(config)(final, positions)
    hidden_from = torch.full((length, length), float("-inf")).triu(1)
    log_probs = []
    for head in drafter.heads:
        layer = LlamaDecoderLayer(config, 0).eval()
        missing = layer.load_state_dict(head.state_dict(), strict=True)
        assert not missing.missing_keys
        output = layer(
            final,
            attention_mask=hidden_from[None, None],
            position_ids=positions,
            position_embeddings=rope,
        )
        hidden = output[0] if isinstance(output, tuple) else output
        narrow = hidden if drafter.lm_down is None else drafter.lm_down(hidden)
        log_probs.append(drafter.lm_head(narrow).log_softmax(-1))
    return torch.stack(log_probs)


@pytest.mark.parametrize("rank", [None, 9])
def test_a_head_is_a_decoder_layer_of_transformers(shallow: Target, rank: int | None) -> None:
    """Decoding gives what the layers give, over rounds that commit unequally many tokens, some
    of them without drafts.
    """
    drafter = make_drafter(shallow, head_rank=rank)
    torch.manual_seed(7)
    tokens = torch.randint(3, 2000, (2, 32))
    expected = reference_log_probs(drafter, shallow, tokens)
    compared = 0
    for row, index, log_q in walk(drafter, shallow, tokens, HEADS):
        torch.testing.assert_close(log_q, expected[:, row, index], rtol=1e-3, atol=1e-3)
        compared += 1
    assert compared > 6


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_the_loss_is_the_sum_over_heads(shallow: Target, loss: Any) -> None:
    """The loss is sum_k head_decay^k L_k over positions whose token k + 2 further on is the
    assistant's, written out.
    """
    drafter = make_drafter(shallow, vocab_size=2048, loss=loss, head_decay=0.7)
    torch.manual_seed(7)
    tokens = torch.randint(3, 2000, (2, 20))
    mask = torch.rand(tokens.shape) < 0.6
    features = shallow.features(tokens, ("final",))
    log_probs = reference_log_probs(drafter, shallow, tokens)
    expected = torch.zeros(())
    p = shallow.head.logits(features.at_layer("final"))[..., drafter.draft_ids].softmax(-1)
    for k in range(HEADS):
        shift = k + 2
        log_q = log_probs[k, :, :-shift]
        is_supervised = mask[:, shift:]
        if loss == "cross_entropy":
            label_index = torch.searchsorted(drafter.draft_ids, tokens[:, shift:].contiguous())
            cost = -log_q.gather(-1, label_index[..., None])[..., 0]
        else:
            target_probs = p[:, shift - 1 : -1]
            cost = (target_probs * (target_probs.log() - log_q)).sum(-1)
        expected = expected + 0.7**k * (cost * is_supervised).sum()
    with torch.no_grad():
        losses = drafter.loss(Batch(tokens, mask, features), shallow, TrainingState())
    torch.testing.assert_close(losses.total, expected, rtol=1e-3, atol=1e-3)
    assert losses.counts.tolist() == [int(mask[:, k + 2 :].sum()) for k in range(HEADS)]


def test_every_head_starts_as_the_targets_own(shallow: Target) -> None:
    """Before training every head has the target's log probabilities over the draft vocabulary."""
    drafter = TransformerHeads(shallow, num_heads=HEADS, vocab_size=256)
    drafter.prepare(shallow, torch.arange(shallow.head.vocab_size))
    probe = Probe(([[20]], [[0]]), ([[20]], [[1]]))
    context = begun(shallow, [[5, 6, 7, 8]], drafter, probe)
    expected = shallow.head.logits(context.new_features.at_layer("final")[:, -1])[
        :, drafter.draft_ids
    ].log_softmax(-1)
    with torch.no_grad():
        proposed(drafter, context, probe)
    log_q = torch.cat(probe.log_q, dim=1)
    torch.testing.assert_close(log_q, expected[:, None].expand_as(log_q), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adapt", ["lora", "full"])
def test_joint_training_adds_the_targets_own_loss(adapt: Any) -> None:
    """The loss is the data's cross-entropy plus heads_weight times the frozen target's terms,
    with gradients for both.
    """
    target = cut_tiny(2)
    drafter = make_drafter(target, adapt=adapt, heads_weight=0.3)
    select_trained_groups(drafter, target, 0)
    heads, adapted = drafter.stages[0].groups
    assert (
        drafter.stages[0].layers == ()
        and adapted["lr_scale"] == 0.1
        and heads["params"] == list(drafter.parameters())
    )
    torch.manual_seed(7)
    tokens = torch.randint(3, 2000, (2, 20))
    mask = torch.rand(tokens.shape) < 0.6
    joint = drafter.loss(Batch(tokens, mask), target, TrainingState())
    alone = drafter._heads_loss(
        Batch(tokens, mask), target.features(tokens, ("final",)).at_layer("final"), TrainingState()
    )
    labels = tokens.masked_fill(~mask, -100)[:, 1:].flatten()
    logits = target.head.logits(target.features(tokens, ("final",)).at_layer("final"))[
        :, :-1
    ].flatten(0, 1)
    torch.testing.assert_close(
        joint.terms["language_model"],
        F.cross_entropy(logits, labels, reduction="sum"),
        rtol=1e-3,
        atol=1e-3,
    )
    torch.testing.assert_close(
        joint.terms["forward_kl"], 0.3 * alone.terms["forward_kl"], rtol=1e-3, atol=1e-3
    )
    joint.total.backward()
    assert all(p.grad is not None for p in heads["params"])
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in adapted["params"])
