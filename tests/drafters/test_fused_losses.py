"""The losses of all families equal what they are by whole matrices of logits, and hold a chunk of these at a time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.config.build import build
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, Losses, TrainingState, stage_at
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.layers.losses import ACCEPTANCE_LOSSES, DIVERGENCES, split_loss
from spectrain.drafters.layers.masks import add_blocks, replace_embeddings
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.pard import Pard
from spectrain.experimental.ctc import drafter as ctc
from spectrain.experimental.gated_lora.drafter import GatedLora
from spectrain.experimental.hydra.drafter import Hydra
from spectrain.experimental.kangaroo.drafter import Kangaroo
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.kernels import linear_divergence as fused
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.fast import pack_linears
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.lora import disable_adapters
from spectrain.models.target import Target
from spectrain.training.checkpoints import select_trained_groups
from tests.factories import make_drafter

LOSSES = ["cross_entropy", *DIVERGENCES]
RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))
VOCAB, WIDTH = 2048, 16
CHUNK = 16


@pytest.fixture
def target(tiny: Target) -> Target:
    """Random, narrow, and of a large vocabulary; its logits are far from flat, scaled and capped."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = ATTENTION_NAME
    config.logit_scale, config.final_logit_softcapping = 0.8, 20.0
    model = LlamaForCausalLM(config)
    shake(model, 1.0)
    found = Target(model, tiny.tokenizer, "random", "")
    found.pack_weights()
    return found


def shake(module: Any, size: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)


def batch_of(drafter: Drafter, target: Target, stage: int = 0, replayed: bool = False, length: int = 20) -> Batch:
    """Sequences of unequal length, supervised in two spans or all along; of replays, some tokens behind a wrong one."""
    rows = torch.randint(3, VOCAB, (3, length)).tolist()
    masks = [[1 <= i < length // 2 or i > length // 2 + 3 for i in range(length - 3 * row)] for row in range(3)]
    data = Dataset([Example(row[: len(mask)], mask) for row, mask in zip(rows, masks)], 3, 0, 0)
    batch = LiveSource().make_batch(BatchRequest(data[[0, 1, 2]], target, drafter.stages[stage].layers))
    return replace(batch, tokens_past_error=torch.randint(-1, 4, batch.tokens.shape)) if replayed else batch


# The same losses by whole matrices


def row_losses(name: str, log_p: Tensor, log_q: Tensor, tokens: Tensor, distance: Tensor | None = None) -> Tensor:
    """By name, or the split loss of replays, [R]."""
    if distance is not None:
        return split_loss(log_p, log_q, distance)
    return -log_q.gather(-1, tokens[:, None])[:, 0] if name == "cross_entropy" else DIVERGENCES[name](log_p, log_q)


def logits_of(target: Target, batch: Batch) -> Tensor:
    with torch.no_grad():
        return target.head.logits(target.features(batch.tokens, ("final",)).at_layer("final"))


def ahead(drafter: Any, batch: Batch, logits: Tensor, said: Tensor, step: int) -> tuple[Tensor, int, int]:
    """Loss, hits and count of what a drafter says at every index [B, T, V], two tokens and `step` ahead."""
    end = max(0, batch.tokens.shape[1] - 2 - step)
    asked = batch.loss_mask[:, 2 + step :]
    log_q, tokens, ids = said[:, :end][asked].log_softmax(-1), batch.tokens[:, 2 + step :][asked], drafter.draft_ids
    logits = logits[:, 1 + step : 1 + step + end][asked]
    distance = None if batch.tokens_past_error is None else batch.tokens_past_error[:, 2 + step :][asked]
    best = tokens if drafter.divergence == "cross_entropy" and distance is None else logits.argmax(-1)
    own_mass = drafter.divergence in ACCEPTANCE_LOSSES
    log_p = logits.log_softmax(-1)[:, ids] if own_mass else logits[:, ids].log_softmax(-1)
    place = (best[:, None] == ids).int().argmax(-1)
    losses = row_losses(drafter.divergence, log_p, log_q, place, distance)
    counted = losses if own_mass else losses[drafter.t2d[best]]
    return counted.sum(), int((ids[log_q.argmax(-1)] == best).sum()), len(best)


def steps(results: list[tuple[Tensor, int, int]], weights: list[float], names: list[str]) -> Losses:
    terms: dict[str, Tensor] = {}
    for (loss, _, _), weight, name in zip(results, weights, names, strict=True):
        terms[name] = terms.get(name, 0.0) + weight * loss
    return Losses(terms, torch.tensor([r[1] for r in results]).float(), torch.tensor([r[2] for r in results]).float())


def eagle3(drafter: Eagle3, batch: Batch, target: Target) -> Losses:
    """Every step with keys of its own, over all keys of the first step and its own index's of later ones."""
    assert batch.features is not None
    logits, results, keys, values = logits_of(target, batch), [], [], []
    hidden = drafter.fc(batch.features.fuse_layers(drafter.fused_layers))
    length = batch.tokens.shape[1]
    for step in range(drafter.num_steps):
        embedded = target.head.embed(batch.tokens.roll(-1 - step, dims=1)).detach()
        x = torch.cat([drafter.input_layernorm(embedded), drafter.hidden_norm(hidden)], dim=-1)
        q, k, v = drafter.self_attn.project_qkv(x, drafter.rotary(x, torch.arange(length)[None] + step))
        keys.append(k)
        values.append(v)
        mask = torch.cat([torch.ones(length, length).tril().bool(), *step * [torch.eye(length).bool()]], dim=1)
        attended = scaled_dot_product_attention(
            q, torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=mask, enable_gqa=True
        )
        hidden = hidden + drafter.self_attn.project_output(attended)
        hidden = hidden + drafter.mlp(drafter.post_attention_layernorm(hidden))
        results.append(ahead(drafter, batch, logits, drafter.lm_head(drafter.norm(hidden)), step))
    return steps(results, [0.8**step for step in range(drafter.num_steps)], [drafter.divergence] * len(results))


def head_weights(drafter: Any) -> tuple[list[float], list[str]]:
    count = len(drafter.heads)
    return [0.8 ** (k + 1) for k in range(count)], [f"head{k}" for k in range(count)]


def medusa(drafter: Medusa, batch: Batch, target: Target) -> Losses:
    logits = logits_of(target, batch)
    final = target.run(batch.tokens, ForwardPlan(layers=("final",), grad=drafter.target_training is not None)).at_layer("final")
    heads = steps(
        [ahead(drafter, batch, logits, head(final), k) for k, head in enumerate(drafter.heads)], *head_weights(drafter)
    )
    if drafter.target_training is None:
        return heads
    log_q = target.head.logits(final)[:, :-1][batch.loss_mask[:, 1:]].log_softmax(-1)
    name = "forward_kl" if drafter.self_distillation else "cross_entropy"
    with disable_adapters(target):
        log_p = logits_of(target, batch)[:, :-1][batch.loss_mask[:, 1:]].log_softmax(-1)
    model = row_losses(name, log_p, log_q, batch.tokens[:, 1:][batch.loss_mask[:, 1:]]).sum()
    return replace(heads, terms={"language_model": model, **{k: 0.2 * loss for k, loss in heads.terms.items()}})


def hydra(drafter: Hydra, batch: Batch, target: Target) -> Losses:
    assert batch.features is not None
    logits, final, results = logits_of(target, batch), batch.features.at_layer("final"), []
    for k, head in enumerate(drafter.heads):
        embedded = [target.head.embed(batch.tokens.roll(-1 - j, dims=1)).detach() for j in range(k + 1)]
        results.append(ahead(drafter, batch, logits, head(torch.cat([final, *embedded], dim=-1)), k))
    return steps(results, *head_weights(drafter))


def next_token(drafter: Any, batch: Batch, logits: Tensor, said: Tensor) -> Losses:
    """Of a drafter that says [B, T, V] at index t the token t + 1."""
    asked = batch.loss_mask[:, 1:]
    log_p, log_q = (x[:, :-1][asked].log_softmax(-1) for x in (logits, said))
    tokens, distance = (
        batch.tokens[:, 1:][asked],
        None if batch.tokens_past_error is None else batch.tokens_past_error[:, 1:][asked],
    )
    losses = row_losses(drafter.divergence, log_p, log_q, tokens, distance)
    best = tokens if drafter.divergence == "cross_entropy" and distance is None else log_p.argmax(-1)
    hits = (log_q.argmax(-1) == best).sum()[None].float()
    return Losses({drafter.divergence: losses.sum()}, hits, torch.full_like(hits, len(tokens)))


def causal(drafter: Causal, batch: Batch, target: Target) -> Losses:
    said = drafter.model.run(batch.tokens, ForwardPlan(logits=True, grad=True)).logits
    assert said is not None
    return next_token(drafter, batch, logits_of(target, batch) / 2, said[..., :VOCAB] / 2)  # loss_temperature is 2


def kangaroo(drafter: Kangaroo, batch: Batch, target: Target) -> Losses:
    assert batch.features is not None
    x = batch.features.at_layer(drafter.exit_layer)
    normed = drafter.input_layernorm(x)
    q, k, v = drafter.self_attn.project_qkv(normed, drafter.rotary(normed, torch.arange(x.shape[1])[None]))
    states = drafter.norm(x + drafter.self_attn.attend_causal(q, k, v))
    return next_token(drafter, batch, logits_of(target, batch), target.head.logits(states))


def by_mask(depths: Tensor, right: Tensor, count: int) -> tuple[Tensor, Tensor]:
    hits = torch.tensor([float(right[depths == depth].sum()) for depth in range(count)])
    return hits, torch.tensor([float((depths == depth).sum()) for depth in range(count)])


def pard(drafter: Pard, batch: Batch, target: Target) -> Losses:
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    with replace_embeddings(drafter.model.head.embedding, drafter.mask, blocks.mask_index):
        said = drafter.model.run(
            blocks.tokens, ForwardPlan(logits=True, grad=True, positions=blocks.positions, mask=blocks.visible)
        ).logits
    assert said is not None
    asked = torch.cat([batch.next_is_supervised, blocks.supervised[:, batch.tokens.shape[1] :]], dim=1)
    logits = logits_of(target, batch).gather(1, blocks.positions[..., None].expand(-1, -1, VOCAB))
    log_p, log_q = (x[asked].log_softmax(-1) for x in (logits, said))
    losses = row_losses(drafter.divergence, log_p, log_q, blocks.labels[asked])
    right = log_q.argmax(-1) == log_p.argmax(-1)
    weight = of_sequences(asked, batch)
    hits = by_mask(blocks.mask_index[asked] + 1, right, drafter.num_drafts)
    return Losses({drafter.divergence: (weight * losses).sum()}, *hits)


def of_sequences(asked: Tensor, batch: Batch) -> Tensor:
    """[R] what a place counts of a sequence that counts as many as it has supervised tokens."""
    rows = [mask.sum() / count.clamp(min=1) for mask, count in zip(batch.loss_mask, asked.sum(1))]
    return torch.stack(rows)[asked.nonzero()[:, 0]]


def gated_lora(drafter: GatedLora, batch: Batch, target: Target) -> Losses:
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    with drafter.insert_masks(target, blocks.mask_index):
        final = target.run(
            blocks.tokens, ForwardPlan(layers=("final",), grad=True, positions=blocks.positions, mask=blocks.visible)
        ).at_layer("final")
    asked = blocks.supervised
    states, positions = final[asked], blocks.positions
    anchors = final.detach().gather(1, positions[..., None].expand_as(final))[asked]
    log_p = target.head.logits(anchors).log_softmax(-1)
    previous = target.head.embed(batch.tokens.gather(1, positions)[asked])
    assert drafter.sampler is not None
    terms, weight = {}, of_sequences(asked, batch)
    for name, read in (("masks", states), ("sampler", drafter.sampler(states, previous))):
        log_q = target.head.logits(read).log_softmax(-1)
        terms[name] = (weight * row_losses(drafter.divergence, log_p, log_q, blocks.labels[asked])).sum()
    terms["consistency"] = (weight * (states - anchors).square().mean(-1)).sum()
    return Losses(terms, *by_mask(blocks.mask_index[asked], log_q.argmax(-1) == log_p.argmax(-1), drafter.num_masks))


def early_exit(drafter: EarlyExit, batch: Batch, target: Target) -> Losses:
    count, asked = target.num_layers, batch.next_is_supervised
    wanted: Tensor = batch.tokens.roll(-1, dims=1)[asked]
    if drafter.self_distillation:
        with drafter.target_training.use_original(target) as original:
            wanted = logits_of(original, batch)[asked].softmax(-1)
    states = target.run(batch.tokens, ForwardPlan(layers=tuple(range(1, count + 1)), grad=True))
    logits = [target.head.logits(target.apply_final_norm(states.at_layer(n + 1), grad=True))[asked] for n in range(count)]
    losses = [torch.nn.functional.cross_entropy(said, wanted, reduction="sum") for said in logits]
    *early, last = (weight * loss for weight, loss in zip(drafter.exit_weights(count, STATE), losses, strict=True))
    hits = (logits[drafter.exit_layer - 1].argmax(-1) == logits[-1].argmax(-1)).sum()[None].float()
    return Losses({"language_model": last, "exits": sum(early)}, hits, torch.full_like(hits, int(asked.sum())))  # type: ignore[dict-item]


STATE = TrainingState(progress=0.6)
SMALL = {"vocab_size": VOCAB // 2}
FAMILIES: dict[str, tuple[Any, Callable[..., Losses], dict[str, Any]]] = {
    "eagle3": (Eagle3, eagle3, {**SMALL, "ttt_steps": 4}),
    "medusa": (Medusa, medusa, SMALL),
    "hydra": (Hydra, hydra, {**SMALL, "num_layers": 2}),
    "causal": (Causal, causal, {"loss_temperature": 2.0, "num_layers": 2}),
    "kangaroo": (Kangaroo, kangaroo, {"exit_layer": 2}),
    "pard": (Pard, pard, {"num_drafts": 3}),
    "gated_lora": (GatedLora, gated_lora, {"num_masks": 3}),
}
TRAINING_THE_TARGET: dict[str, tuple[Any, Callable[..., Losses], dict[str, Any]]] = {
    "medusa lora": (Medusa, medusa, {**SMALL, "adapt": "lora", "loss": "forward_kl"}),
    "medusa distilled": (Medusa, medusa, {**SMALL, "adapt": "lora", "loss": "lk_hybrid", "self_distillation": True}),
    "medusa full": (Medusa, medusa, {**SMALL, "adapt": "full"}),
    **{
        f"early exit {curriculum} {adapt} {distilled}": (
            EarlyExit,
            early_exit,
            {"curriculum": curriculum, "rotate": 2, "adapt": adapt, "self_distillation": distilled, "exit_layer": 2},
        )
        for curriculum, adapt, distilled in (("all", "full", False), ("rotational", "lora", True), ("all", "full", True))
    },
}


def gradients(losses: Losses, parameters: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(losses.total, parameters, allow_unused=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(parameters, found)]


def equal(drafter: Any, reference: Callable[..., Losses], batch: Batch, target: Target, stage: int = 0) -> None:
    """Every term, hits, counts, and the gradient of every parameter that learns."""
    select_trained_groups(drafter, target, stage)
    parameters = [p for group in drafter.stages[stage].groups for p in group["params"]]
    found, expected = drafter.loss(batch, target, STATE), reference(drafter, batch, target)
    assert found.terms.keys() == expected.terms.keys() and expected.counts.sum() > 0
    for name, term in expected.terms.items():
        torch.testing.assert_close(found.terms[name], term, rtol=1e-5, atol=1e-5, msg=name)
    assert found.hits.tolist() == expected.hits.tolist() and found.counts.tolist() == expected.counts.tolist()
    for actual, wanted in zip(gradients(found, parameters), gradients(expected, parameters), strict=True):
        assert (actual - wanted).norm() <= 1e-5 * wanted.norm() + 1e-7
    assert any(wanted.norm() > 0.1 for wanted in gradients(drafter.loss(batch, target, STATE), parameters))


@pytest.mark.sweep(15)
@pytest.mark.parametrize("chunk", [CHUNK, 2048])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_whole_matrices(
    target: Target, family: str, loss: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a draft vocabulary of half of the tokens where there is one, in one chunk of rows or in several."""
    kind, reference, options = FAMILIES[family]
    drafter = make_drafter(kind, target, **options, loss=loss)
    drafter.prepare(target, torch.randint(0, 1000, (VOCAB,)))
    shake(drafter, 0.3)
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    equal(drafter, reference, batch_of(drafter, target), target)


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl", "total_variation"])
@pytest.mark.parametrize("family", ["eagle3", "medusa", "hydra", "causal", "kangaroo"])
def test_split_loss_of_replays_equals_that_of_whole_matrices(
    target: Target, family: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft-OPD's loss, whatever the family is trained on otherwise."""
    kind, reference, options = FAMILIES[family]
    drafter = make_drafter(kind, target, **options, loss=loss)
    assert drafter.capabilities.on_policy is not None
    drafter.prepare(target, torch.randint(0, 1000, (VOCAB,)))
    shake(drafter, 0.3)
    monkeypatch.setattr(fused, "CHUNK_ROWS", CHUNK)
    equal(drafter, reference, batch_of(drafter, target, replayed=True), target)


@pytest.mark.sweep(6, free=("chunk", "name"))
@pytest.mark.parametrize("chunk", [CHUNK, 2048])
@pytest.mark.parametrize("name", TRAINING_THE_TARGET)
def test_losses_that_train_the_target_equal_those_of_whole_matrices(
    target: Target, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medusa-2 and early exits: through the target's own head, which learns too where all weights do."""
    kind, reference, options = TRAINING_THE_TARGET[name]
    drafter = make_drafter(kind, target, **options).eval()  # no layer is dropped
    drafter.prepare(target, torch.randint(0, 1000, (VOCAB,)))
    shake(drafter, 0.3)
    with torch.no_grad():
        for parameter in drafter.capabilities.target_training.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    stage = stage_at(drafter.stages, 1, 1)
    equal(drafter, reference, batch_of(drafter, target, stage), target, stage)


# Memory


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.size = max(self.size, x.numel())
        return result


NARROW = {  # as the target is: no weight is so large, and no mask
    "dspark": ["drafter.rank=4"], "dflash2": ["drafter.selector_rank=4"],
    "domino": ["drafter.rank=4", "drafter.gru_width=16"], "xpress": ["drafter.rank=4"],
    "lilicorr": ["drafter.correction_width=16", "drafter.factor_width=16"], "judge": ["+drafter.places=4"],
    "specdec": ["+drafter.num_anchors=12", "+drafter.num_heads=2"],
}  # fmt: skip


@pytest.mark.sweep(5, free=("recipe",))
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_holds_the_logits_of_all_rows(target: Target, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every stage, loss and backward return nothing of the size rows x vocabulary, which one chunk of all rows does."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=[f"recipe={recipe}", *NARROW.get(recipe, ())])
    drafter: Drafter = build(config.drafter, target=target)
    counts = torch.randint(0, 1000, (VOCAB,))
    counts[0] = 0  # the mask token, where there is one
    drafter.prepare(target, counts)
    pack_linears(drafter)
    for stage in sorted({stage_at(drafter.stages, step, 8) for step in range(8)}):
        select_trained_groups(drafter, target, stage)
        batch = batch_of(drafter, target, stage, length=60)
        rows, sizes = batch.num_supervised - 3 * 8, {}  # the last of eight heads is asked at so many places
        for chunk in (CHUNK, 2048):
            monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
            monkeypatch.setattr(ctc, "MAX_LOGITS", chunk * VOCAB)
            with Largest() as largest:
                drafter(batch, target, TrainingState(progress=0.9)).total.backward()
            sizes[chunk] = largest.size
        assert sizes[CHUNK] < rows * VOCAB // 2 < rows * VOCAB <= sizes[2048]
