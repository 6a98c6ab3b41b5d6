"""The base of drafters that train masks in the frozen target, with LoRA that acts at the masks
only.

Shapes: B batch, T tokens, N packed tokens or tree nodes, K masks, D target width, V vocabulary, R
supervised masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Share, Steps, Width
from spectrain.drafters.base import Losses, TrainingState, has_weights
from spectrain.drafters.layers.losses import LossName, TargetLogProbs, head_loss
from spectrain.drafters.layers.mask_blocks import MaskBlocks, add_blocks
from spectrain.drafters.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget, argmax_and_log_z
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import chosen_rows, on_host, select_rows
from spectrain.models.target import Target
from spectrain.randomness import NOISE, sequence_generator

from .lora_at_tokens import LoraFactors, add_lora_at, find_linears, peft_config, peft_layout
from .mask_drafter import MaskDrafter, Strategy
from .mask_prefixes import sample_prefixes, tile_prefixes


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Settings of every drafter with gated masks."""

    # Number of mask tokens behind a prefix, which is the number of drafts.
    num_masks: Steps = 4
    # Rank of LoRA at the mask tokens; 0 trains no LoRA.
    rank: int = 16
    # Scale of LoRA; its output is multiplied by alpha / rank.
    alpha: float = 32.0
    # Where masks run: behind every tree node (quadratic), behind one deepest node (linear), or in a
    # forward of their own before verification (apart).
    strategy: Strategy = "quadratic"
    # Number of tree nodes with masks behind them under quadratic; null puts masks behind all nodes.
    num_hosts: Width | None = None
    # Whether to train a sampler head that also reads the previous token.
    sampler: bool = True
    # Loss of each mask: a cross-entropy with the data or a divergence from the target.
    loss: LossName = "cross_entropy"
    # Weight of the latent consistency loss, the mean squared difference from the ordinary token's
    # state.
    consistency: float = 1.0
    # Factor from 0 to 1 between the loss weights of successive masks.
    step_decay: Share = 1.0
    # Number of mask tokens per ordinary token in a training batch.
    mask_ratio: float = 1.0
    # Block lengths for successive equal parts of the training, which tile the text; null places
    # blocks behind random prefixes.
    tiles: list[int] | None = None
    # Seed of the prefixes and of random mask tokens.
    seed: int = 0


class GatedMasks(MaskDrafter):
    """`num_masks` masks after a prefix, and LoRA at them only: ordinary tokens are computed as
    without the drafter.

    LoRA is on every linear of the decoder layers; the fused experts of a mixture have none, so
    there it is on the attention. With rank 0 it is absent.

    The loss sums over masks whose label is the assistant's: that of the target's head at the mask,
    the same of the sampler head, which also reads the previous token (teacher-forced), and
    `consistency` times the mean square of state - state of the ordinary token at that position,
    which is held fixed (the latent consistency loss). The label is the data's token or the target's
    distribution, from the ordinary token of the same forward. Blocks of all masks follow random
    prefixes, `mask_ratio` mask tokens to an ordinary one, so that a forward reads at most (1 +
    mask_ratio) T tokens of a sequence; or blocks of `tiles` tokens, these lengths one after another
    for equal parts of the training, tile the text. Each mask weighs `step_decay` times the one
    before it.

    Decoding verifies a tree and its masks in one forward. quadratic puts all masks after every
    node, so that drafts are ready whatever is accepted, or with `num_hosts` after so many nodes
    where a round is likeliest to end; linear puts them after one deepest node only. After another
    end nothing is drafted. The first round's masks run after the prompts. With apart, a round is
    two forwards, and verification has no masks: the first forward runs root and masks and is not
    cached; its prediction at the root, the target's own, is the first draft, those at masks are the
    others.
    """

    def __init__(self, target: Target, config: MaskConfig, first_layer: int = 0) -> None:
        super().__init__()
        check_settings(config)
        self.num_masks = config.num_masks
        self.rank = config.rank
        self.alpha = config.alpha
        self.strategy = config.strategy
        self.tiles = config.tiles
        self.num_hosts = config.num_hosts
        self.divergence = config.loss
        self.consistency = config.consistency
        self.mask_ratio = config.mask_ratio
        self.seed = config.seed
        self.step_decay = config.step_decay
        # The first layer of the target that the masks run through.
        self.first_layer = first_layer
        self.capabilities = replace(self.make_capabilities(), adapts_layers=self.rank > 0)
        self.head = target.head
        linears = find_linears(target, first_layer) if self.rank else {}
        # Names of the target's linears that LoRA acts on, in the layers that the masks run through.
        self.names = list(linears)
        sidecars = {
            "adapter_config.json": peft_config(
                self.names, self.rank, self.alpha, target.path, first_layer
            )
        }
        self.saved = replace(
            self.saved, layout=peft_layout(self.names), sidecars=sidecars if self.rank else {}
        )
        self.factors = nn.ModuleList(LoraFactors(linear, self.rank) for linear in linears.values())
        self.add_inputs(target)
        self.sampler = Sampler(target.width) if config.sampler else None

    def add_inputs(self, target: Target) -> None:
        """Add the parameters that the inputs of the masks are made of; by default there are none,
        and masks have the embeddings of their tokens.
        """

    def insert_inputs(
        self, target: Target, mask_index: Tensor, rows: Tensor, hosts: Tensor | None
    ) -> AbstractContextManager[None]:
        """Replace the masks' embeddings, or states, inside the context; by default none. The
        arguments are those of `insert_masks`.
        """
        return nullcontext()

    # The gate

    @contextmanager
    def insert_masks(
        self,
        target: Target,
        mask_index: Tensor,
        rows: Tensor | None = None,
        hosts: Tensor | None = None,
    ) -> Iterator[None]:
        if rows is None:
            rows = chosen_rows(on_host(mask_index) >= 0, mask_index.device)
        with ExitStack() as stack:
            stack.enter_context(self.insert_inputs(target, mask_index, rows, hosts))
            if self.rank and len(rows):
                factors = dict(zip(self.names, self.factors))
                stack.enter_context(
                    add_lora_at(target, factors, self.alpha / self.rank, rows, mask_index.numel())
                )
            yield

    # Training

    @property
    def first_trained_layer(self) -> int:
        """Return the first layer of the target that the backward pass runs through."""
        return self.first_layer

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the target's layers over all tokens and masks, with an attention
        mask in every layer.
        """
        judged = batch.supervised if self.tiles else self.mask_ratio * batch.tokens
        num_masks = judged * self.masks_per_host / self.num_masks
        rows = batch.tokens + num_masks
        layers = nn.ModuleList(list(target.layers)[self.first_trained_layer :])
        runs = [Run(layers, rows, rows / batch.texts, mask=rows * rows / batch.texts)]
        runs += [Run(self.factors, num_masks, 0)]
        below = rows * self.first_trained_layer / target.num_layers
        return StepCost(
            runs,
            Judged(judged, target.head.vocab_size, judged, copies=1, label_copies=1),
            forward_rows=below,
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        if not has_weights(self):
            return super().loss(batch, target, state)
        blocks = self.make_blocks(batch, state)
        # [B, N] index among the N of the last token of each one's prefix
        host_index = (blocks.anchor_index - blocks.mask_index - 1).clamp(min=0)
        grad = torch.is_grad_enabled()
        with self.insert_masks(target, self.number_masks(blocks), hosts=host_index):
            features = target.run(
                blocks.tokens,
                ForwardPlan(
                    layers=("final",),
                    grad=grad,
                    positions=blocks.positions,
                    mask=blocks.visible,
                    lengths=blocks.lengths,
                ),
            )
        final = features.at_layer("final")
        states, is_judged = self.read_masks(final, blocks)
        labels = select_rows(blocks.labels, is_judged)
        mask_index = select_rows(blocks.mask_index, is_judged)
        anchors = final.detach().gather(1, blocks.anchor_index[..., None].expand_as(final))
        anchors = select_rows(anchors, is_judged)
        with torch.no_grad():
            tokens = batch.tokens.gather(1, blocks.token_index)
            previous = self.head.embed(select_rows(tokens, is_judged))
        inputs = {"masks": states}
        if self.sampler is not None:
            inputs["sampler"] = self.sampler(states, previous).to(states.dtype)
        head = self.head.projection
        target_log_probs = TargetLogProbs(HeadTarget(anchors, head))
        weights = blocks.loss_weights(is_judged, batch, self.step_decay**mask_index)
        terms = {}
        for name, hidden in inputs.items():
            result = head_loss(
                self.divergence, hidden, head, labels, target_log_probs, row_weight=weights
            )
            terms[name] = result.loss
        if self.consistency:
            terms["consistency"] = (
                self.consistency * (weights * (states - anchors).float().pow(2).mean(-1)).sum()
            )
        # Without a supervised mask, other processes still wait for gradients.
        if not len(labels):
            terms["masks"] = (
                terms["masks"]
                + 0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()
            )
        best = (
            argmax_and_log_z(anchors, head)[0]
            if self.divergence == "cross_entropy"
            else result.labels
        )
        return Losses.by_depth(
            terms, (result.predictions == best).float(), mask_index, self.num_masks
        )

    def make_blocks(self, batch: Batch, state: TrainingState) -> MaskBlocks:
        """Append this step's masks to the prefixes of a batch."""
        prefixes = self.prefixes(batch, state.step, state.progress)
        if not self.has_random_tokens:
            return add_blocks(batch, prefixes)
        mask_tokens = []
        for (tokens, _), row in zip(batch.split_documents(), prefixes):
            source = sequence_generator(NOISE, self.seed, tokens, state.step)
            count = sum(size for _, size in row)
            mask_tokens.append(
                torch.randint(self.head.vocab_size, (count,), generator=source).tolist()
            )
        return add_blocks(batch, prefixes, mask_tokens)

    def number_masks(self, blocks: MaskBlocks) -> Tensor:
        """Return which of a host's masks every token is [B, N]; negative at ordinary tokens."""
        return blocks.mask_index

    def read_masks(self, final: Tensor, blocks: MaskBlocks) -> tuple[Tensor, Tensor]:
        """Return the states [R, D] that are judged, from those [B, N, D] of all tokens, and where
        [B, N] their labels are.
        """
        return select_rows(final, blocks.supervised), blocks.supervised

    def prefixes(
        self, batch: Batch, step: int, progress: float = 0.0
    ) -> list[list[tuple[int, int]]]:
        """Return the prefixes of every sequence that have a label for one of their masks: those
        that end where a tile begins, or random ones, drawn for its own tokens and the step."""
        if not self.tiles:
            return sample_prefixes(batch, self.num_masks, self.mask_ratio, self.seed, step)
        return tile_prefixes(
            batch, self.tiles[min(int(progress * len(self.tiles)), len(self.tiles) - 1)]
        )

    # Decoding

    def drafting_layers(self, target: Target) -> nn.Module:
        """Return the head and the sampler, and with strategy=apart the target's layers, which
        run masks before verification.
        """
        sampler = [] if self.sampler is None else [self.sampler]
        run = [target.layers, self.factors] if self.strategy == "apart" else []
        return nn.ModuleList([self.head.output, *sampler, *run])


class Sampler(nn.Module):
    """Corrects a mask's state for the token before it by two layers in a residual branch, which is
    zero at first.

    The authors let the two layers, each with a norm, replace the state, which they must then first
    learn to pass on.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * width, width)
        self.first_norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, state: Tensor, previous: Tensor) -> Tensor:
        """Return the inputs [.., D] of the target's head from states and embeddings of the
        previous tokens [.., D].
        """
        # An embedding is about 20 times smaller than a normed state.
        previous = F.rms_norm(previous, previous.shape[-1:])
        x = torch.cat([state, previous], dim=-1).to(self.first.weight.dtype)
        return state + self.second(self.first_norm(F.silu(self.first(x))))


def check_settings(config: MaskConfig) -> None:
    """Raise `UserError` for settings out of range."""
    for key, value, least in (("num_masks", config.num_masks, 1), ("rank", config.rank, 0)):
        if value < least:
            raise UserError(f"drafter.{key}={value}: use {least} or more")
    if not config.mask_ratio > 0:
        raise UserError(f"drafter.mask_ratio={config.mask_ratio}: use more than 0")
    if not config.consistency >= 0:
        raise UserError(f"drafter.consistency={config.consistency}: use 0 or more")
    tiles = config.tiles
    if tiles is not None and not (tiles and all(1 <= size <= config.num_masks for size in tiles)):
        raise UserError(
            f"drafter.tiles={list(tiles)}: use lengths from 1 to "
            f"drafter.num_masks={config.num_masks}"
        )
