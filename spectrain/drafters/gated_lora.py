"""Gated-LoRA mask tokens (Samragh et al., 2025, "Your LLM knows the future"): the target predicts its own next tokens.

Shapes: B batch, T tokens, N packed tokens or tree nodes, K masks, D target width, V vocabulary, R supervised masks, F frontier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels import counter
from spectrain.kernels.linear_divergence import HeadTarget, most_likely
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.randomness import MASKED_PREFIXES, NOISE, sequence_generator
from spectrain.settings.values import Steps
from spectrain.trees.base import DepthRollout, Draft, at_depth
from spectrain.trees.token_tree import Accepted, TokenTree

from .abilities import Abilities, Capture, DraftingCost, SavedFiles
from .base import Drafter, Losses, Stage, TrainingState, has_weights
from .context import Context
from .shared.gate import LoraFactors, added_at, linears_of, peft_config, peft_layout
from .shared.losses import Loss, TargetLogProbs, head_loss
from .shared.masks import Blocks, add_blocks, mask_embeddings, prefix_ends, start_masks

if TYPE_CHECKING:
    from spectrain.models.target import Target


class Sampler(nn.Module):
    """A mask's state and what it lacks, given the token before: two layers beside it that add nothing at first.

    The authors put the two layers, each with a norm behind it, in the state's place: they must first learn to pass it on.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, state: Tensor, previous: Tensor) -> Tensor:
        """States and embeddings [..., D] -> what the target's head reads [..., D]."""
        previous = F.rms_norm(previous, previous.shape[-1:])  # an embedding is some 20 times smaller than a normed state
        x = torch.cat([state, previous], dim=-1).to(self.first.weight.dtype)
        return state + self.second(self.first_norm(F.silu(self.first(x))))


class GatedLora(Drafter):
    """`num_masks` mask tokens behind a prefix, and LoRA that acts at them only: ordinary tokens are computed as ever.

    LoRA is on every linear of the decoder layers; fused experts of a mixture are none, so there it is on the attention. At the
    masks stand learned vectors, or by `noise` a uniformly random token each (Uno, arXiv 2609.04010), or the mean embedding of
    the prompt, for which nothing is trained (Goel et al., 2026, without their updates of it while decoding). With rank 0
    the vectors alone learn (PaSS, Monea et al., 2023).

    Loss, over masks whose answer is the assistant's: that of the target's head at the mask, the same of the sampler head, which
    also reads the token before (teacher-forced), and `consistency` times the mean square of state - state of the ordinary
    token at that position, which is held fixed (the latent consistency loss). `loss` is the data's token or a divergence from
    what the target says there, known from the ordinary token of the same forward. Blocks of all masks stand behind random
    prefixes, `mask_ratio` mask tokens to an ordinary one, so that a forward sees at most (1 + mask_ratio) T tokens of a
    sequence; or blocks of `tiles` tokens, these lengths one after another for equal parts of the training, tile the text.

    Decoding verifies a tree and its masks in one forward. quadratic puts all masks behind every node, so that drafts are ready
    whatever is accepted; linear puts them behind one deepest node only, and nothing is drafted after another end. The first
    round's masks run behind the prompts. With apart, a round is two forwards, and verification has no masks: the first one runs
    root and masks and is forgotten; its answer at the root, the target's own, is the first draft, those at masks the others.
    """

    saved = SavedFiles(
        shape=("num_masks", "rank", "alpha", "sampler", "noise"),
        layout=lambda drafter: peft_layout(drafter.names),
        sidecars=lambda drafter: drafter.sidecars(),
    )
    cost = DraftingCost(
        extra_nodes=lambda drafter, builder: drafter.num_masks * (builder.budget if drafter.strategy == "quadratic" else 1),
        passes=lambda drafter, depth: min(1.0, depth) if drafter.strategy == "apart" else depth,
        weights=lambda drafter, target: drafter.drafting_layers(target),
        forwards=lambda drafter: int(drafter.strategy == "apart"),
    )

    def __init__(
        self,
        target: Target,
        num_masks: Steps = 4,
        rank: int = 16,  # of LoRA; 0: what stands at masks alone learns, with the sampler
        alpha: float = 32.0,
        strategy: Literal["quadratic", "linear", "apart"] = "quadratic",  # masks behind every node, the deepest, or before
        sampler: bool = True,  # a head that reads the token before, too
        noise: Literal["masks", "uniform", "mean"] = "masks",  # learned vectors, random tokens, the prompt's mean embedding
        loss: Loss = "cross_entropy",
        consistency: float = 1.0,
        mask_ratio: float = 1.0,
        tiles: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check(num_masks, rank, mask_ratio, consistency, tiles)
        if noise == "mean" and (rank or sampler):
            raise UserError("drafter.noise=mean: nothing is trained with it; use drafter.rank=0 drafter.sampler=false")
        self.num_masks, self.rank, self.alpha, self.strategy = num_masks, rank, alpha, strategy
        self.noise, self.tiles = noise, tiles
        self.divergence, self.consistency, self.mask_ratio, self.seed = loss, consistency, mask_ratio, seed
        carried = ("means",) if noise == "mean" else ()
        ready = () if strategy == "apart" else ("states", "ready_at")
        # Masks behind every node are ready whatever is accepted; behind one node, the host must know whether they are.
        capture = None if strategy == "linear" else Capture(carried=(*ready, *carried))
        prefill = GatedLora.prefill if ready or carried else None
        self.abilities = Abilities(capture=capture, adapts_layers=rank > 0, prefill=prefill)
        self.head, self.path = target.head, target.path
        linears = linears_of(target) if rank else {}
        self.names = list(linears)  # of the target's linears that LoRA acts on
        self.factors = nn.ModuleList(LoraFactors(linear, rank) for linear in linears.values())
        self.masks = nn.Parameter(torch.zeros(num_masks, target.width)) if noise == "masks" else None
        self.sampler = Sampler(target.width) if sampler else None
        self.means: Tensor | None = None  # [B, 1, D] of the embeddings of each prompt
        self.states: Tensor | None = None  # [B, hosts, K, D] of the masks of this round's tree
        self.ready_at: Tensor | None = None  # [B] how much was committed when the states were those behind it; -1 never
        self.hosts: Tensor | None = None  # [B, hosts] the nodes that masks stand behind
        self.numbers: Tensor | None = None  # [B, N] which mask a node is

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the masks near the mean embedding; a forward without LoRA and a sampler that adds nothing need no more."""
        if self.masks is not None:
            with torch.no_grad():
                self.masks.copy_(start_masks(self.head.embedding, self.num_masks))

    def sidecars(self) -> dict[str, str]:
        """What peft reads beside the factors."""
        return {"adapter_config.json": peft_config(self.names, self.rank, self.alpha, self.path)} if self.rank else {}

    # The gate

    @contextmanager
    def gated(self, target: Target, numbers: Tensor, rows: Tensor | None = None) -> Iterator[None]:
        """Run the target with mask vectors and LoRA where `numbers` [B, N] names a mask; elsewhere nothing is added. Where the
        masks' places among all B N tokens are said, nothing is asked."""
        rows = (numbers >= 0).flatten().nonzero()[:, 0] if rows is None else rows
        vectors = self.means if self.noise == "mean" else self.masks
        with ExitStack() as stack:
            if vectors is not None:
                stack.enter_context(mask_embeddings(target.head.embedding, vectors, numbers))
            if self.rank and len(rows):
                factors = dict(zip(self.names, self.factors))
                stack.enter_context(added_at(target, factors, self.alpha / self.rank, rows, numbers.numel()))
            yield

    # Training

    @property
    def stages(self) -> list[Stage]:
        """Without features: the target runs in the loss, with masks."""
        return [Stage.whole(self, ())]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        if not has_weights(self):
            return super().loss(batch, target, state)
        blocks = self.blocks(batch, state)
        grad = torch.is_grad_enabled()
        with self.gated(target, blocks.numbers):
            seen = target.run(
                blocks.tokens,
                ForwardPlan(
                    layers=("final",), grad=grad, positions=blocks.positions, mask=blocks.visible, lengths=blocks.lengths
                ),
            )
        final, asked = seen.at("final"), blocks.supervised
        states, answers, numbers = final[asked], blocks.answers[asked], blocks.numbers[asked]
        anchors = final.detach().gather(1, blocks.anchors[..., None].expand_as(final))[asked]
        with torch.no_grad():
            previous = self.head.embed(batch.tokens.gather(1, blocks.places)[asked])
        read = {"masks": states}
        if self.sampler is not None:
            read["sampler"] = self.sampler(states, previous).to(states.dtype)
        head = self.head.projection
        theirs = TargetLogProbs(HeadTarget(anchors, head))
        weights = blocks.weights(asked, batch)
        terms = {}
        for name, hidden in read.items():
            judged = head_loss(self.divergence, hidden, head, answers, theirs, row_weight=weights)
            terms[name] = judged.loss
        if self.consistency:
            terms["consistency"] = self.consistency * (weights * (states - anchors).float().pow(2).mean(-1)).sum()
        if not len(answers):  # no mask to learn from: other processes still wait for gradients
            terms["masks"] = terms["masks"] + 0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()
        tokens = self.divergence == "cross_entropy"
        right = (judged.best == (most_likely(anchors, head)[0] if tokens else judged.labels)).float()
        return Losses.by_depth(terms, right, numbers, self.num_masks)

    def blocks(self, batch: Batch, state: TrainingState) -> Blocks:
        """The batch with this step's masks behind its prefixes."""
        prefixes = self.prefixes(batch, state.step, state.progress)
        if self.noise != "uniform":
            return add_blocks(batch, prefixes)
        said = []
        for (tokens, _), row in zip(batch.sequences(), prefixes):
            source = sequence_generator(NOISE, self.seed, tokens, state.step)
            count = sum(size for _, size in row)
            said.append(torch.randint(self.head.vocab_size, (count,), generator=source).tolist())
        return add_blocks(batch, prefixes, said)

    def prefixes(self, batch: Batch, step: int, progress: float = 0.0) -> list[list[tuple[int, int]]]:
        """Of every sequence the prefixes with an answer for one of their masks: those that end where a tile begins, or random
        ones, drawn for its own tokens and the step."""
        if self.tiles:
            size = self.tiles[min(int(progress * len(self.tiles)), len(self.tiles) - 1)]
            ends = [prefix_ends(mask, size).tolist() for _, mask in batch.sequences()]
            return [[(end, size) for end in row if (end + 1) % size == 0] for row in ends]
        rows = []
        for tokens, mask in batch.sequences():
            found = prefix_ends(mask, self.num_masks)
            length = int(tokens.nonzero()[-1]) + 1 if tokens.any() else 0  # without padding
            source = sequence_generator(MASKED_PREFIXES, self.seed, tokens, step)
            count = max(1, int(self.mask_ratio * length / self.num_masks))
            chosen = found[torch.randperm(len(found), generator=source)[:count]].sort().values
            rows.append([(end, self.num_masks) for end in chosen.tolist()])
        return rows

    # Decoding

    def drafting_layers(self, target: Target) -> nn.Module:
        """What drafting reads: the head, and the sampler, where the masks have run with the verification before."""
        sampler = [] if self.sampler is None else [self.sampler]
        run = [target.layers, self.factors] if self.strategy == "apart" else []
        return nn.ModuleList([self.head.output, *sampler, *run])

    def noise_at(self, context: Context, positions: Tensor) -> Tensor:
        """The random tokens that stand at masks with these positions [B, M], whatever the text is batched with."""
        key = counter.key(NOISE, self.seed, context.sequence_ids[:, None], positions)
        return counter.bits(key, torch.zeros_like(positions)) % self.head.vocab_size

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """The first round's masks stand right behind each prompt: nothing committed sees them, and the cache keeps none."""
        steps = torch.arange(tokens.shape[1] + self.num_masks, device=tokens.device)
        if self.noise == "mean":
            real = (steps[: tokens.shape[1]] < lengths[:, None])[..., None]
            self.means = (self.head.embed(tokens) * real).sum(1, keepdim=True) / lengths[:, None, None]
        if self.strategy == "apart":
            return context.prefill(tokens, lengths)
        places = lengths[:, None] + steps[: self.num_masks]
        padded = F.pad(tokens, (0, self.num_masks))
        if self.noise == "uniform":
            padded = padded.scatter(1, places, self.noise_at(context, places))
        numbers = torch.full_like(padded, -1).scatter(1, places, places - lengths[:, None])
        rows = places + torch.arange(len(places), device=tokens.device)[:, None] * padded.shape[1]
        with self.gated(context.target, numbers, rows.flatten()):
            seen = context.target.prefill(padded, lengths, context.cache, ("final",))
        states = seen.at("final")
        self.states = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
        self.ready_at = lengths.clone()
        return Features(tokens, (), seen.hidden[:, : tokens.shape[1], :0], seen.logits)

    def draft(self, context: Context) -> Draft:
        """Draft from the masks behind the last accepted node, where there were any; then put masks behind the new nodes."""
        if self.strategy == "apart":
            return Draft(_Masks(self, self.ahead(context), context.root))
        assert self.states is not None and self.ready_at is not None
        with_masks = partial(self._with_masks, context)
        if context.cache.bound is not None and self.strategy == "quadratic":
            return Draft(_Masks(self, self.states, context.root), complete=with_masks)  # every row is ready
        ready = self.ready_at == context.cache.lengths
        if not ready.any():
            children = context.builder.children
            q = None if children == "deterministic" else context.fresh.hidden.new_zeros(len(ready), 1, self.head.vocab_size)
            return Draft(complete=lambda root: with_masks(replace(root, children=children, q=q)))

        def complete(tree: TokenTree) -> TokenTree:
            first = torch.arange(tree.tokens.shape[1], device=ready.device) == 0
            return with_masks(tree.select(tree.valid & (ready[:, None] | first)))

        return Draft(_Masks(self, self.states, context.root), complete=complete)

    def ahead(self, context: Context) -> Tensor:
        """States [B, 1 + K, D] of the root, which is the target's own, and of as many masks behind it as the tree's depth has a
        use for; the cache keeps none of it."""
        root = context.root[:, None]
        order = torch.arange(min(self.num_masks, context.builder.depth - 1), device=root.device)
        number = torch.cat([torch.full_like(root, -1), order.expand(len(root), -1)], dim=1)
        tokens = root.expand_as(number)
        if self.noise == "uniform":
            noise = self.noise_at(context, context.cache.lengths[:, None] + 1 + order)
            tokens = torch.cat([root, noise], dim=1)
        rows = torch.arange(number.numel(), device=root.device).view_as(number)[:, 1:].flatten()
        with self.gated(context.target, number, rows):
            seen = context.target.run(tokens, ForwardPlan(layers=("final",), cache=context.cache))
        context.cache.forget()
        return seen.at("final")

    def _with_masks(self, context: Context, tree: TokenTree) -> TokenTree:
        """The tree's nodes, then each host's masks as a chain below it, never emitted."""
        batch, num_nodes = tree.tokens.shape
        if self.strategy == "quadratic":
            self.hosts = torch.arange(num_nodes, device=tree.tokens.device).expand(batch, -1)
        else:
            self.hosts = (tree.depths * tree.valid).argmax(-1)[:, None]
        count = self.hosts.shape[1]
        number = torch.arange(self.num_masks, device=tree.tokens.device)
        place = num_nodes + torch.arange(count, device=number.device)[:, None] * self.num_masks + number
        parents = torch.where(number == 0, self.hosts[..., None], place - 1).flatten(1)
        nothing = torch.zeros_like(parents)
        self.numbers = torch.cat([torch.full_like(tree.tokens, -1), number.repeat(count).expand(batch, -1)], dim=1)
        q = None if tree.q is None else F.pad(tree.q, (0, 0, 0, parents.shape[1]))
        valid = tree.valid.gather(1, self.hosts).repeat_interleave(self.num_masks, dim=1)
        words = nothing
        if self.noise == "uniform":
            depths = tree.depths.gather(1, self.hosts).repeat_interleave(self.num_masks, dim=1) + 1 + number.repeat(count)
            words = self.noise_at(context, context.cache.lengths[:, None] + depths)
        return TokenTree(
            torch.cat([tree.tokens, words], dim=1),
            torch.cat([tree.parents, parents], dim=1),
            torch.cat([tree.valid, valid], dim=1),
            torch.cat([torch.ones_like(tree.valid), nothing.bool()], dim=1),
            tree.children,
            q,
            tree.draft_ids,
            None if tree.height is None else tree.height + self.num_masks,
            tree.most_children,
        )

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """Logits at the nodes that can be emitted; those of masks are left at zero, for nothing reads them."""
        if self.strategy == "apart":
            return context.verify(tree)
        assert self.numbers is not None and self.hosts is not None
        positions = context.cache.lengths[:, None] + tree.depths
        num_masks = self.hosts.shape[1] * self.num_masks
        places = torch.arange(tree.tokens.numel(), device=tree.tokens.device).view_as(tree.tokens)
        with self.gated(context.target, self.numbers, places[:, -num_masks:].flatten()):
            seen = context.target.run(
                tree.tokens, ForwardPlan(layers=("final",), positions=positions, mask=tree.ancestors, cache=context.cache)
            )
        final = seen.at("final")
        self.states = final[:, -num_masks:].unflatten(1, (self.hosts.shape[1], self.num_masks))
        logits = self.head.logits(final[:, :-num_masks])
        return Features(tree.tokens, seen.layers, seen.hidden, F.pad(logits, (0, 0, 0, num_masks)))

    def commit(self, context: Context, accepted: Accepted) -> None:
        """Keep the states of the masks behind the last accepted node."""
        if self.strategy == "apart":
            return
        assert self.states is not None and self.hosts is not None
        last = accepted.path.gather(1, (accepted.counts - 1)[:, None])
        found = self.hosts == last
        index = found.long().argmax(-1)[:, None, None, None].expand(-1, 1, *self.states.shape[2:])
        self.states = self.states.gather(1, index)[:, 0]
        self.ready_at = torch.where(found.any(-1), context.cache.lengths, -1)


class _Masks(DepthRollout):
    """One round: the mask of a depth, and with a sampler the token before; the first may be the target's own state."""

    def __init__(self, drafter: GatedLora, states: Tensor, root: Tensor) -> None:
        super().__init__(root, states.shape[1])
        self.drafter, self.states = drafter, states  # [B, K, D], or [B, 1 + K, D]

    def start(self) -> Tensor:
        own = self.drafter.strategy == "apart"
        return self._log_q(self.states[:, :1]) if own else super().start()

    def after(self, depth: Tensor, tokens: Tensor) -> Tensor:
        states = at_depth(self.states, depth)
        if self.drafter.sampler is not None:
            states = self.drafter.sampler(states, self.drafter.head.embed(tokens)).to(states.dtype)
        return self._log_q(states)

    def _log_q(self, states: Tensor) -> Tensor:
        head = self.drafter.head
        return head.logits(states.to(head.output.weight.dtype)).log_softmax(-1)


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
