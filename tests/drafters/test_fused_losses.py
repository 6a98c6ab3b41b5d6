"""The losses of all families equal those from full matrices of logits, and hold a chunk of these
at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.config.build import build
from spectrain.config.choices import choice_files, conf_folders
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, Losses, TrainingState, stage_at
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.layers.losses import ACCEPTANCE_LOSSES, DIVERGENCES, forward_kl
from spectrain.drafters.layers.mask_blocks import add_blocks, replace_embeddings
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.pard import Pard
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch, RowLoss
from spectrain.features.live_source import LiveSource
from spectrain.kernels import linear_divergence as fused
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.fast import pack_linears
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.lora import disable_adapters
from spectrain.models.target import Target
from spectrain.training.checkpoints import select_trained_groups
from tests.factories import make_drafter
from tests.installed import load_cases

LOSSES = ["cross_entropy", *DIVERGENCES]
RECIPES = sorted(choice_files("recipe", conf_folders()))
VOCAB = 2048
WIDTH = 16
CHUNK = 16


@pytest.fixture
def target(tiny: Target) -> Target:
    """A random, narrow target with a large vocabulary; its logits are far from flat, scaled and
    capped.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    config._attn_implementation = ATTENTION_NAME
    config.logit_scale = 0.8
    config.final_logit_softcapping = 20.0
    model = LlamaForCausalLM(config)
    add_noise(model, 1.0)
    target = Target(model, tiny.tokenizer, "random", "")
    target.pack_weights()
    return target


def add_noise(module: Any, size: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)


@dataclass(frozen=True)
class DistantBatch(Batch):
    """A batch whose rows have a divergence of their own, which reads their distance [B, T]."""

    distance: Tensor = field(kw_only=True)

    def row_loss(self, is_predicted: Tensor) -> RowLoss:
        return RowLoss(None, decay_kl, (self.distance.roll(-1, dims=1)[is_predicted],))


def decay_kl(log_p: Tensor, log_q: Tensor, distance: Tensor) -> Tensor:
    """Return forward KL that decays with the distance of a row."""
    return 0.8 ** distance.clamp(min=0) * forward_kl(log_p, log_q)


def make_batch(
    drafter: Drafter, target: Target, stage: int = 0, is_distant: bool = False, length: int = 20
) -> Batch:
    """Make sequences of unequal length, supervised in two spans or all along, with the
    drafter's own loss or another one.
    """
    rows = torch.randint(3, VOCAB, (3, length)).tolist()
    masks = [
        [1 <= i < length // 2 or i > length // 2 + 3 for i in range(length - 3 * row)]
        for row in range(3)
    ]
    data = Dataset([Example(row[: len(mask)], mask) for row, mask in zip(rows, masks)], 3, 0, 0)
    batch = LiveSource().make_batch(
        BatchRequest(data[[0, 1, 2]], target, drafter.stages[stage].layers)
    )
    if not is_distant:
        return batch
    distance = torch.randint(-1, 4, batch.tokens.shape)
    return DistantBatch(batch.tokens, batch.loss_mask, batch.features, distance=distance)


def read_distance(batch: Batch) -> Tensor | None:
    """Return the distance [B, T] of every token; None where the drafter's own loss counts."""
    return batch.distance if isinstance(batch, DistantBatch) else None


# The same losses by full matrices


def compute_row_losses(
    name: str, log_p: Tensor, log_q: Tensor, tokens: Tensor, distance: Tensor | None = None
) -> Tensor:
    """Compute losses [R] by name, or those of rows with a distance."""
    if distance is not None:
        return decay_kl(log_p, log_q, distance)
    return (
        -log_q.gather(-1, tokens[:, None])[:, 0]
        if name == "cross_entropy"
        else DIVERGENCES[name](log_p, log_q)
    )


def compute_logits(target: Target, batch: Batch) -> Tensor:
    with torch.no_grad():
        return target.head.logits(target.features(batch.tokens, ("final",)).at_layer("final"))


def compute_step_loss(
    drafter: Any, batch: Batch, logits: Tensor, drafter_logits: Tensor, step: int
) -> tuple[Tensor, int, int]:
    """Compute loss, hits and count of a drafter's logits [B, T, V] at every index, two tokens
    and `step` ahead.
    """
    end = max(0, batch.tokens.shape[1] - 2 - step)
    mask = batch.loss_mask[:, 2 + step :]
    log_q = drafter_logits[:, :end][mask].log_softmax(-1)
    tokens = batch.tokens[:, 2 + step :][mask]
    ids = drafter.draft_ids
    logits = logits[:, 1 + step : 1 + step + end][mask]
    distances = read_distance(batch)
    distance = None if distances is None else distances[:, 2 + step :][mask]
    best = (
        tokens if drafter.divergence == "cross_entropy" and distance is None else logits.argmax(-1)
    )
    own_mass = drafter.divergence in ACCEPTANCE_LOSSES
    log_p = logits.log_softmax(-1)[:, ids] if own_mass else logits[:, ids].log_softmax(-1)
    label_index = (best[:, None] == ids).int().argmax(-1)
    losses = compute_row_losses(drafter.divergence, log_p, log_q, label_index, distance)
    counted_losses = losses if own_mass else losses[drafter.t2d[best]]
    return counted_losses.sum(), int((ids[log_q.argmax(-1)] == best).sum()), len(best)


def combine_steps(
    results: list[tuple[Tensor, int, int]], weights: list[float], names: list[str]
) -> Losses:
    terms: dict[str, Tensor] = {}
    for (loss, _, _), weight, name in zip(results, weights, names, strict=True):
        terms[name] = terms.get(name, 0.0) + weight * loss
    return Losses(
        terms,
        torch.tensor([r[1] for r in results]).float(),
        torch.tensor([r[2] for r in results]).float(),
    )


def compute_eagle3_losses(drafter: Eagle3, batch: Batch, target: Target) -> Losses:
    """Compute the losses of every step, over all keys of the first step and its own index's of
    later steps.
    """
    assert batch.features is not None
    logits = compute_logits(target, batch)
    results = []
    keys = []
    values = []
    hidden = drafter.fc(batch.features.fuse_layers(drafter.fused_layers))
    length = batch.tokens.shape[1]
    for step in range(drafter.num_steps):
        embedded = target.head.embed(batch.tokens.roll(-1 - step, dims=1)).detach()
        x = torch.cat([drafter.input_layernorm(embedded), drafter.hidden_norm(hidden)], dim=-1)
        q, k, v = drafter.self_attn.project_qkv(
            x, drafter.rotary(x, torch.arange(length)[None] + step)
        )
        keys.append(k)
        values.append(v)
        mask = torch.cat(
            [torch.ones(length, length).tril().bool(), *step * [torch.eye(length).bool()]], dim=1
        )
        attended = scaled_dot_product_attention(
            q, torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=mask, enable_gqa=True
        )
        hidden = hidden + drafter.self_attn.project_output(attended)
        hidden = hidden + drafter.mlp(drafter.post_attention_layernorm(hidden))
        results.append(
            compute_step_loss(drafter, batch, logits, drafter.lm_head(drafter.norm(hidden)), step)
        )
    return combine_steps(
        results,
        [0.8**step for step in range(drafter.num_steps)],
        [drafter.divergence] * len(results),
    )


def list_head_weights(drafter: Any) -> tuple[list[float], list[str]]:
    count = len(drafter.heads)
    return [0.8 ** (k + 1) for k in range(count)], [f"head{k}" for k in range(count)]


def compute_medusa_losses(drafter: Medusa, batch: Batch, target: Target) -> Losses:
    logits = compute_logits(target, batch)
    final = target.run(
        batch.tokens, ForwardPlan(layers=("final",), grad=drafter.target_training is not None)
    ).at_layer("final")
    heads = combine_steps(
        [
            compute_step_loss(drafter, batch, logits, head(final), k)
            for k, head in enumerate(drafter.heads)
        ],
        *list_head_weights(drafter),
    )
    if drafter.target_training is None:
        return heads
    log_q = target.head.logits(final)[:, :-1][batch.loss_mask[:, 1:]].log_softmax(-1)
    name = "forward_kl" if drafter.self_distillation else "cross_entropy"
    with disable_adapters(target):
        log_p = compute_logits(target, batch)[:, :-1][batch.loss_mask[:, 1:]].log_softmax(-1)
    model = compute_row_losses(
        name, log_p, log_q, batch.tokens[:, 1:][batch.loss_mask[:, 1:]]
    ).sum()
    return replace(
        heads, terms={"language_model": model, **{k: 0.2 * loss for k, loss in heads.terms.items()}}
    )


def compute_next_token_losses(
    drafter: Any, batch: Batch, logits: Tensor, drafter_logits: Tensor
) -> Losses:
    """Compute the losses of a drafter whose logits [B, T, V] at index t are for the token t + 1."""
    mask = batch.loss_mask[:, 1:]
    log_p, log_q = (x[:, :-1][mask].log_softmax(-1) for x in (logits, drafter_logits))
    tokens = batch.tokens[:, 1:][mask]
    distances = read_distance(batch)
    distance = None if distances is None else distances[:, 1:][mask]
    losses = compute_row_losses(drafter.divergence, log_p, log_q, tokens, distance)
    best = (
        tokens if drafter.divergence == "cross_entropy" and distance is None else log_p.argmax(-1)
    )
    hits = (log_q.argmax(-1) == best).sum()[None].float()
    return Losses({drafter.divergence: losses.sum()}, hits, torch.full_like(hits, len(tokens)))


def compute_causal_losses(drafter: Causal, batch: Batch, target: Target) -> Losses:
    logits = drafter.model.run(batch.tokens, ForwardPlan(logits=True, grad=True)).logits
    assert logits is not None
    # loss_temperature is 2
    return compute_next_token_losses(
        drafter, batch, compute_logits(target, batch) / 2, logits[..., :VOCAB] / 2
    )


def count_by_mask(depths: Tensor, right: Tensor, count: int) -> tuple[Tensor, Tensor]:
    hits = torch.tensor([float(right[depths == depth].sum()) for depth in range(count)])
    return hits, torch.tensor([float((depths == depth).sum()) for depth in range(count)])


def compute_pard_losses(drafter: Pard, batch: Batch, target: Target) -> Losses:
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    with replace_embeddings(drafter.model.head.embedding, drafter.mask, blocks.mask_index):
        drafter_logits = drafter.model.run(
            blocks.tokens,
            ForwardPlan(logits=True, grad=True, positions=blocks.positions, mask=blocks.visible),
        ).logits
    assert drafter_logits is not None
    mask = torch.cat(
        [batch.next_is_supervised, blocks.supervised[:, batch.tokens.shape[1] :]], dim=1
    )
    logits = compute_logits(target, batch).gather(
        1, blocks.positions[..., None].expand(-1, -1, VOCAB)
    )
    log_p, log_q = (x[mask].log_softmax(-1) for x in (logits, drafter_logits))
    losses = compute_row_losses(drafter.divergence, log_p, log_q, blocks.labels[mask])
    right = log_q.argmax(-1) == log_p.argmax(-1)
    weight = weigh_sequences(mask, batch)
    hits = count_by_mask(blocks.mask_index[mask] + 1, right, drafter.num_drafts)
    return Losses({drafter.divergence: (weight * losses).sum()}, *hits)


def weigh_sequences(supervised: Tensor, batch: Batch) -> Tensor:
    """Return the weight [R] of a position in a sequence that weighs as many as it has supervised
    tokens.
    """
    rows = [
        mask.sum() / count.clamp(min=1) for mask, count in zip(batch.loss_mask, supervised.sum(1))
    ]
    return torch.stack(rows)[supervised.nonzero()[:, 0]]


def compute_early_exit_losses(drafter: EarlyExit, batch: Batch, target: Target) -> Losses:
    count = target.num_layers
    mask = batch.next_is_supervised
    labels: Tensor = batch.tokens.roll(-1, dims=1)[mask]
    if drafter.self_distillation:
        with drafter.target_training.use_original(target) as original:
            labels = compute_logits(original, batch)[mask].softmax(-1)
    states = target.run(batch.tokens, ForwardPlan(layers=tuple(range(1, count + 1)), grad=True))
    logits = [
        target.head.logits(target.apply_final_norm(states.at_layer(n + 1), grad=True))[mask]
        for n in range(count)
    ]
    losses = [
        torch.nn.functional.cross_entropy(exit_logits, labels, reduction="sum")
        for exit_logits in logits
    ]
    *early, last = (
        weight * loss
        for weight, loss in zip(drafter.exit_weights(count, STATE), losses, strict=True)
    )
    hits = (logits[drafter.exit_layer - 1].argmax(-1) == logits[-1].argmax(-1)).sum()[None].float()
    return Losses(
        {"language_model": last, "exits": sum(early)}, hits, torch.full_like(hits, int(mask.sum()))
    )  # type: ignore[dict-item]


STATE = TrainingState(progress=0.6)
SMALL = {"vocab_size": VOCAB // 2}
# Cases of installed packages.
CASES = load_cases(__name__)

FAMILIES: dict[str, tuple[Any, Callable[..., Losses], dict[str, Any]]] = {
    "eagle3": (Eagle3, compute_eagle3_losses, {**SMALL, "ttt_steps": 4}),
    "medusa": (Medusa, compute_medusa_losses, SMALL),
    "causal": (Causal, compute_causal_losses, {"loss_temperature": 2.0, "num_layers": 2}),
    "pard": (Pard, compute_pard_losses, {"num_drafts": 3}),
    **CASES.get("FAMILIES", {}),
}
TRAINING_THE_TARGET: dict[str, tuple[Any, Callable[..., Losses], dict[str, Any]]] = {
    "medusa lora": (
        Medusa,
        compute_medusa_losses,
        {**SMALL, "adapt": "lora", "loss": "forward_kl"},
    ),
    "medusa distilled": (
        Medusa,
        compute_medusa_losses,
        {**SMALL, "adapt": "lora", "loss": "lk_hybrid", "self_distillation": True},
    ),
    "medusa full": (Medusa, compute_medusa_losses, {**SMALL, "adapt": "full"}),
    **{
        f"early exit {curriculum} {adapt} {distilled}": (
            EarlyExit,
            compute_early_exit_losses,
            {
                "curriculum": curriculum,
                "rotate": 2,
                "adapt": adapt,
                "self_distillation": distilled,
                "exit_layer": 2,
            },
        )
        for curriculum, adapt, distilled in (
            ("all", "full", False),
            ("rotational", "lora", True),
            ("all", "full", True),
        )
    },
}


def compute_gradients(losses: Losses, parameters: list[Tensor]) -> list[Tensor]:
    gradients = torch.autograd.grad(losses.total, parameters, allow_unused=True)
    return [
        torch.zeros_like(x) if gradient is None else gradient
        for x, gradient in zip(parameters, gradients)
    ]


def check_equal(
    drafter: Any, reference: Callable[..., Losses], batch: Batch, target: Target, stage: int = 0
) -> None:
    """Check every term, hits, counts, and the gradient of every parameter that learns."""
    select_trained_groups(drafter, target, stage)
    parameters = [p for group in drafter.stages[stage].groups for p in group["params"]]
    losses = drafter.loss(batch, target, STATE)
    expected = reference(drafter, batch, target)
    assert losses.terms.keys() == expected.terms.keys() and expected.counts.sum() > 0
    for name, term in expected.terms.items():
        torch.testing.assert_close(losses.terms[name], term, rtol=1e-5, atol=1e-5, msg=name)
    assert (
        losses.hits.tolist() == expected.hits.tolist()
        and losses.counts.tolist() == expected.counts.tolist()
    )
    for gradient, expected_gradient in zip(
        compute_gradients(losses, parameters), compute_gradients(expected, parameters), strict=True
    ):
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm() + 1e-7
    assert any(
        gradient.norm() > 0.1
        for gradient in compute_gradients(drafter.loss(batch, target, STATE), parameters)
    )


@pytest.mark.sweep(15)
@pytest.mark.parametrize("chunk", [CHUNK, 2048])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_whole_matrices(
    target: Target, family: str, loss: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients are equal, over half of the tokens with a draft vocabulary, in one
    chunk of rows or several.
    """
    kind, reference, options = FAMILIES[family]
    drafter = make_drafter(kind, target, **options, loss=loss)
    drafter.prepare(target, torch.randint(0, 1000, (VOCAB,)))
    add_noise(drafter, 0.3)
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    check_equal(drafter, reference, make_batch(drafter, target), target)


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl", "total_variation"])
@pytest.mark.parametrize("family", ["eagle3", "medusa", "causal", *CASES.get("distant", ())])
def test_another_loss_of_rows_equals_that_of_full_matrices(
    target: Target, family: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that the source of the batch sets is equal, whatever loss the family has."""
    kind, reference, options = FAMILIES[family]
    drafter = make_drafter(kind, target, **options, loss=loss)
    drafter.prepare(target, torch.randint(0, 1000, (VOCAB,)))
    add_noise(drafter, 0.3)
    monkeypatch.setattr(fused, "CHUNK_ROWS", CHUNK)
    check_equal(drafter, reference, make_batch(drafter, target, is_distant=True), target)


@pytest.mark.sweep(6, free=("chunk", "name"))
@pytest.mark.parametrize("chunk", [CHUNK, 2048])
@pytest.mark.parametrize("name", TRAINING_THE_TARGET)
def test_losses_that_train_the_target_equal_those_of_whole_matrices(
    target: Target, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of Medusa-2 and early exits are equal through the target's own head, which learns
    too if all weights do.
    """
    kind, reference, options = TRAINING_THE_TARGET[name]
    drafter = make_drafter(kind, target, **options).eval()  # no layer is dropped
    drafter.prepare(target, torch.randint(0, 1000, (VOCAB,)))
    add_noise(drafter, 0.3)
    with torch.no_grad():
        for parameter in drafter.capabilities.target_training.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    stage = stage_at(drafter.stages, 1, 1)
    check_equal(drafter, reference, make_batch(drafter, target, stage), target, stage)


# Memory


class LargestTensor(TorchDispatchMode):
    """A mode that measures the size of the largest tensor that any operation returned."""

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
    "dspark": ["drafter.rank=4"],
    "dflash2": ["drafter.selector_rank=4"],
    "domino": ["drafter.rank=4", "drafter.gru_width=16"],
    "two_stage_head": ["drafter.rank=4"],
    "xpress": ["drafter.rank=4"],
    "lilicorr": ["drafter.correction_width=16", "drafter.factor_width=16"],
    "judge": ["+drafter.places=4"],
    "specdec": ["+drafter.num_anchors=12", "+drafter.num_heads=2"],
}


@pytest.mark.sweep(5, free=("recipe",))
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_holds_the_logits_of_all_rows(
    target: Target, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every stage, loss and backward return no tensor of size rows x vocabulary, except with
    one chunk of all rows.
    """
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=[f"recipe={recipe}", *NARROW.get(recipe, ())])
    drafter: Drafter = build(config.drafter, target=target)
    counts = torch.randint(0, 1000, (VOCAB,))
    counts[0] = 0  # the mask token, where there is one
    drafter.prepare(target, counts)
    pack_linears(drafter)
    for stage in sorted({stage_at(drafter.stages, step, 8) for step in range(8)}):
        select_trained_groups(drafter, target, stage)
        batch = make_batch(drafter, target, stage, length=60)
        # the last of eight heads is supervised at so many positions
        rows = batch.num_supervised - 3 * 8
        sizes = {}
        for chunk in (CHUNK, 2048):
            monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
            for module in CASES.get("modules_with_chunks", ()):
                monkeypatch.setattr(module, "MAX_LOGITS", chunk * VOCAB)
            with LargestTensor() as largest:
                drafter(batch, target, TrainingState(progress=0.9)).total.backward()
            sizes[chunk] = largest.size
        # The largest other tensor is the workspace of falcon's LSTM: 180 rows of 1,024 numbers.
        assert sizes[CHUNK] < rows * VOCAB * 3 // 4 < rows * VOCAB <= sizes[2048]
