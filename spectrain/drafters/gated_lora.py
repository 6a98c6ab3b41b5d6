"""Gated-LoRA mask tokens (Samragh et al., 2025, "Your LLM knows the future"): the target predicts its own next tokens.

Shapes: B batch, T tokens, N packed tokens or tree nodes, K masks, D target width, V vocabulary, R supervised masks, F frontier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spectrain.config.values import Count, Share, Steps
from spectrain.drafters.layers.heads import Sampler
from spectrain.drafters.layers.hidden_transfer import HiddenTransfer, resolve_transfer_layer, transfer_states
from spectrain.drafters.layers.lora_factors import LoraFactors, add_lora_at, find_linears, peft_config, peft_layout
from spectrain.drafters.layers.losses import LossName, TargetLogProbs, head_loss
from spectrain.drafters.layers.mask_drafter import MaskDrafter, Noise, Strategy
from spectrain.drafters.layers.masks import (
    MaskBlocks,
    add_blocks,
    init_mask_vectors,
    replace_embeddings,
    sample_prefixes,
    tile_prefixes,
)
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget, argmax_and_log_z
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.randomness import NOISE, sequence_generator

from .base import Losses, Stage, TrainingState, has_weights
from .capabilities import SavedFiles

if TYPE_CHECKING:
    from spectrain.models.target import Target

MADE = ("transfer", "streams")  # inside the target


class GatedLora(MaskDrafter):
    """`num_masks` mask tokens behind a prefix, and LoRA that acts at them only: ordinary tokens are computed as ever.

    LoRA is on every linear of the decoder layers; fused experts of a mixture are none, so there it is on the attention. At the
    masks stand learned vectors, or by `noise` a uniformly random token each (Uno, arXiv 2609.04010), or the mean embedding of
    the prompt, for which nothing is trained (Goel et al., 2026, without their updates of it while decoding). With rank 0
    the vectors alone learn (PaSS, Monea et al., 2023). With `ensembles` E there are E chains of masks behind a prefix, which do
    not see each other, and the mean of their states speaks (PPD, Chen et al., 2024, section 3.3). Or masks have no embedding:
    what enters them at `transfer_layer` is made of what enters there at the last known place, by a map for each (transfer,
    Hidden Transfer, arXiv 2404.12022), or by one and a vector for each (streams, Speculative Streaming, arXiv 2402.11131, whose
    target stays frozen here).

    Loss, over masks whose answer is the assistant's: that of the target's head at the mask, the same of the sampler head, which
    also reads the token before (teacher-forced), and `consistency` times the mean square of state - state of the ordinary
    token at that position, which is held fixed (the latent consistency loss). `loss` is the data's token or a divergence from
    what the target says there, known from the ordinary token of the same forward. Blocks of all masks stand behind random
    prefixes, `mask_ratio` mask tokens to an ordinary one, so that a forward sees at most (1 + E mask_ratio) T tokens of a
    sequence; or blocks of `tiles` tokens, these lengths one after another for equal parts of the training, tile the text. Each
    mask counts `step_decay` times the one before it.

    Decoding verifies a tree and its masks in one forward. quadratic puts all masks behind every node, so that drafts are ready
    whatever is accepted, or with `num_hosts` behind so many nodes where a round is likeliest to end (PPD's sparse tree); linear
    puts them behind one deepest node only. After another end nothing is drafted. The first round's masks run behind the
    prompts. With apart, a round is two forwards, and verification has no masks: the first one runs root and masks and is
    forgotten; its answer at the root, the target's own, is the first draft, those at masks the others.
    """

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "noise", "ensembles", "transfer_layer"))

    def __init__(
        self,
        target: Target,
        # Number of mask tokens behind a prefix, which is the number of drafts.
        num_masks: Steps = 4,
        # Rank of LoRA at the mask tokens; 0 trains no LoRA.
        rank: int = 16,
        # Scale of LoRA; its output is multiplied by alpha / rank.
        alpha: float = 32.0,
        # Where masks run: behind every tree node (quadratic), behind one deepest node (linear), or in a forward of their own
        # before verification (apart).
        strategy: Strategy = "quadratic",
        # Number of tree nodes with masks behind them under quadratic; null puts masks behind all nodes.
        num_hosts: Count | None = None,
        # Whether to train a sampler head that also reads the previous token.
        sampler: bool = True,
        # Input of the masks: learned vectors (masks), random tokens (uniform), the prompt's mean embedding (mean), or states
        # made inside the target (transfer, streams).
        noise: Noise = "masks",
        # Layer of the target at which transfer and streams create the masks' states; null uses the middle layer.
        transfer_layer: Count | None = None,
        # Number of chains of learned mask vectors whose states are averaged.
        ensembles: Count = 1,
        # Loss of each mask: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "cross_entropy",
        # Weight of the latent consistency loss, the mean squared difference from the ordinary token's state.
        consistency: float = 1.0,
        # Factor from 0 to 1 between the loss weights of successive masks.
        step_decay: Share = 1.0,
        # Number of mask tokens per ordinary token in a training batch.
        mask_ratio: float = 1.0,
        # Block lengths for successive equal parts of the training, which tile the text; null places blocks behind random
        # prefixes.
        tiles: list[int] | None = None,
        # Seed of the prefixes and of random mask tokens.
        seed: int = 0,
    ) -> None:
        super().__init__()
        check(num_masks, rank, mask_ratio, consistency, tiles)
        check_noise(noise, rank, sampler, ensembles)
        self.num_masks, self.rank, self.alpha, self.strategy = num_masks, rank, alpha, strategy
        self.noise, self.tiles, self.ensembles, self.num_hosts = noise, tiles, ensembles, num_hosts
        self.divergence, self.consistency, self.mask_ratio, self.seed = loss, consistency, mask_ratio, seed
        self.step_decay = step_decay
        self.transfer_layer = resolve_transfer_layer(target, transfer_layer) if noise in MADE else None
        self.capabilities, self.adapts_layers = self.make_capabilities(), rank > 0 or noise in MADE
        self.head, self.path = target.head, target.path
        linears = find_linears(target, self.transfer_layer or 0) if rank else {}
        self.names = list(linears)  # of the target's linears that LoRA acts on: where masks run
        self.saved = replace(self.saved, layout=peft_layout(self.names), sidecars=self.sidecars())
        self.factors = nn.ModuleList(LoraFactors(linear, rank) for linear in linears.values())
        self.masks = nn.Parameter(torch.zeros(self.masks_per_host, target.width)) if noise == "masks" else None
        self.transfer = HiddenTransfer(target.width, num_masks, noise == "streams") if noise in MADE else None
        self.sampler = Sampler(target.width) if sampler else None

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the masks near the mean embedding; a forward without LoRA and a sampler that adds nothing need no more."""
        if self.masks is not None:
            with torch.no_grad():
                self.masks.copy_(init_mask_vectors(self.head.embedding, self.masks_per_host))

    def sidecars(self) -> dict[str, str]:
        """What peft reads beside the factors."""
        config = peft_config(self.names, self.rank, self.alpha, self.path, self.transfer_layer or 0)
        return {"adapter_config.json": config} if self.rank else {}

    # The gate

    @contextmanager
    def insert_masks(
        self, target: Target, numbers: Tensor, rows: Tensor | None = None, hosts: Tensor | None = None
    ) -> Iterator[None]:
        """Run the target with what stands at masks and LoRA where `numbers` [B, N] names one, below `num_rows`; elsewhere
        nothing is added. Where the masks' places among all B N tokens are said, nothing is asked. `hosts` [B, N] are the places
        that masks stand behind, for states that are made of theirs."""
        rows = (numbers >= 0).flatten().nonzero()[:, 0] if rows is None else rows
        vectors = self.means if self.noise == "mean" else self.masks
        with ExitStack() as stack:
            if vectors is not None:
                stack.enter_context(replace_embeddings(target.head.embedding, vectors, numbers))
            if self.transfer is not None and self.transfer_layer is not None and hosts is not None and len(rows):
                stack.enter_context(transfer_states(target, self.transfer_layer, self.transfer, numbers, hosts, rows))
            if self.rank and len(rows):
                factors = dict(zip(self.names, self.factors))
                stack.enter_context(add_lora_at(target, factors, self.alpha / self.rank, rows, numbers.numel()))
            yield

    # Training

    @property
    def stages(self) -> list[Stage]:
        """Without features: the target runs in the loss, with masks."""
        return [Stage.whole(self, ())]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """The target's layers run over all tokens and the masks, with a mask in every attention layer."""
        num_masks = self.ensembles * (batch.supervised if self.tiles else self.mask_ratio * batch.tokens)
        rows = batch.tokens + num_masks
        layers = nn.ModuleList(list(target.layers)[self.transfer_layer or 0 :])
        runs = [Run(layers, rows, rows / batch.texts, mask=rows * rows / batch.texts)]
        runs += [Run(self.factors, num_masks, 0)]
        judged = num_masks / self.ensembles
        below = rows * (self.transfer_layer or 0) / target.num_layers
        return StepCost(runs, Judged(judged, target.head.vocab_size, judged, copies=1, label_copies=1), forward_rows=below)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        if not has_weights(self):
            return super().loss(batch, target, state)
        blocks = self.blocks(batch, state)
        grad = torch.is_grad_enabled()
        with self.insert_masks(target, self.rows_of(blocks), hosts=blocks.host_index):
            seen = target.run(
                blocks.tokens,
                ForwardPlan(
                    layers=("final",), grad=grad, positions=blocks.positions, mask=blocks.visible, lengths=blocks.lengths
                ),
            )
        final, chain = seen.at_layer("final"), blocks.chain_index % self.ensembles
        states = torch.stack([final[blocks.supervised & (chain == number)] for number in range(self.ensembles)]).mean(0)
        asked = blocks.supervised & (chain == 0)  # the others say the same, in the same order
        answers, numbers = blocks.labels[asked], blocks.mask_index[asked]
        anchors = final.detach().gather(1, blocks.anchor_index[..., None].expand_as(final))[asked]
        with torch.no_grad():
            previous = self.head.embed(batch.tokens.gather(1, blocks.token_index)[asked])
        read = {"masks": states}
        if self.sampler is not None:
            read["sampler"] = self.sampler(states, previous).to(states.dtype)
        head = self.head.projection
        theirs = TargetLogProbs(HeadTarget(anchors, head))
        weights = blocks.loss_weights(asked, batch, self.step_decay**numbers)
        terms = {}
        for name, hidden in read.items():
            judged = head_loss(self.divergence, hidden, head, answers, theirs, row_weight=weights)
            terms[name] = judged.loss
        if self.consistency:
            terms["consistency"] = self.consistency * (weights * (states - anchors).float().pow(2).mean(-1)).sum()
        if not len(answers):  # no mask to learn from: other processes still wait for gradients
            terms["masks"] = terms["masks"] + 0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()
        tokens = self.divergence == "cross_entropy"
        right = (judged.predictions == (argmax_and_log_z(anchors, head)[0] if tokens else judged.labels)).float()
        return Losses.by_depth(terms, right, numbers, self.num_masks)

    def blocks(self, batch: Batch, state: TrainingState) -> MaskBlocks:
        """The batch with this step's masks behind its prefixes, of all chains of a prefix one after another."""
        prefixes = self.prefixes(batch, state.step, state.progress)
        prefixes = [[one for one in row for _ in range(self.ensembles)] for row in prefixes]
        if self.noise != "uniform":
            return add_blocks(batch, prefixes)
        said = []
        for (tokens, _), row in zip(batch.split_documents(), prefixes):
            source = sequence_generator(NOISE, self.seed, tokens, state.step)
            count = sum(size for _, size in row)
            said.append(torch.randint(self.head.vocab_size, (count,), generator=source).tolist())
        return add_blocks(batch, prefixes, said)

    def rows_of(self, blocks: MaskBlocks) -> Tensor:
        """[B, N] which of the `num_rows` masks stands at each place; negative at ordinary tokens."""
        return blocks.mask_index + self.num_masks * (blocks.chain_index % self.ensembles) * (blocks.mask_index >= 0)

    def prefixes(self, batch: Batch, step: int, progress: float = 0.0) -> list[list[tuple[int, int]]]:
        """Of every sequence the prefixes with an answer for one of their masks: those that end where a tile begins, or random
        ones, drawn for its own tokens and the step."""
        if not self.tiles:
            return sample_prefixes(batch, self.num_masks, self.mask_ratio, self.seed, step)
        return tile_prefixes(batch, self.tiles[min(int(progress * len(self.tiles)), len(self.tiles) - 1)])

    # Decoding

    def drafting_layers(self, target: Target) -> nn.Module:
        """What drafting reads: the head, and the sampler, where the masks have run with the verification before."""
        sampler = [] if self.sampler is None else [self.sampler]
        run = [target.layers, self.factors] if self.strategy == "apart" else []
        return nn.ModuleList([self.head.output, *sampler, *run])


def check(num_masks: int, rank: int, mask_ratio: float, consistency: float, tiles: list[int] | None) -> None:
    """Refuse settings that mean nothing."""
    for key, value, least in (("num_masks", num_masks, 1), ("rank", rank, 0)):
        if value < least:
            raise UserError(f"drafter.{key}={value}: use {least} or more")
    if not mask_ratio > 0:
        raise UserError(f"drafter.mask_ratio={mask_ratio}: use more than 0")
    if not consistency >= 0:
        raise UserError(f"drafter.consistency={consistency}: use 0 or more")
    if tiles is not None and not (tiles and all(1 <= size <= num_masks for size in tiles)):
        raise UserError(f"drafter.tiles={list(tiles)}: use lengths from 1 to drafter.num_masks={num_masks}")


def check_noise(noise: Noise, rank: int, sampler: bool, ensembles: int) -> None:
    """Refuse settings that do not go with what stands at masks."""
    if noise == "mean" and (rank or sampler):
        raise UserError("drafter.noise=mean: nothing is trained with it; use drafter.rank=0 drafter.sampler=false")
    if ensembles > 1 and noise != "masks":
        raise UserError(f"drafter.ensembles={ensembles}: they are of learned vectors; use drafter.noise=masks")
