"""Gated-LoRA mask tokens (Samragh et al., 2025, "Your LLM knows the future"): the target predicts its own next tokens.

Shapes: B batch, T tokens, N packed tokens or tree nodes, K masks, D target width, V vocabulary, R supervised masks, F frontier.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget, most_likely
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.randomness import MASKED_PREFIXES, sequence_generator
from spectrain.settings.values import Steps
from spectrain.trees.base import DepthRollout, Draft
from spectrain.trees.token_tree import Accepted, TokenTree

from .abilities import Abilities, Capture, DraftingCost, SavedFiles
from .base import Drafter, Losses, Stage, TrainingState
from .context import Context
from .shared.losses import Loss, TargetLogProbs, head_loss
from .shared.masks import add_blocks, mask_embeddings, prefix_ends, start_masks

if TYPE_CHECKING:
    from spectrain.models.target import Target


class LoraFactors(nn.Module):
    """B A x alpha / rank, nothing at first (Hu et al., 2022)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))


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

    LoRA is on every linear of the decoder layers; fused experts of a mixture are none, so there it is on the attention.

    Loss, over masks whose answer is the assistant's: that of the target's head at the mask, the same of the sampler head, which
    also reads the token before (teacher-forced), and `consistency` times the mean square of state - state of the ordinary
    token at that position, which is held fixed (the latent consistency loss). `loss` is the data's token or a divergence from
    what the target says there. Blocks of all masks stand behind random prefixes, `mask_ratio` mask tokens to an ordinary one,
    so that a forward sees at most (1 + mask_ratio) T tokens of a sequence.

    Decoding verifies a tree and its masks in one forward. quadratic puts all masks behind every node, so that drafts are ready
    whatever is accepted; linear puts them behind one deepest node only, and nothing is drafted after another end. The first
    round's masks run behind the prompts.
    """

    saved = SavedFiles(
        shape=("num_masks", "rank", "alpha", "sampler"),
        layout=lambda drafter: drafter.adapter_layout(),
        sidecars=lambda drafter: {"adapter_config.json": drafter.adapter_config()} if drafter.rank else {},
    )
    cost = DraftingCost(
        extra_nodes=lambda drafter, builder: drafter.num_masks * (builder.budget if drafter.strategy == "quadratic" else 1),
        weights=lambda drafter, target: drafter.drafting_layers(),
    )

    def __init__(
        self,
        target: Target,
        num_masks: Steps = 4,
        rank: int = 16,  # of LoRA; 0: mask vectors alone learn, with the sampler
        alpha: float = 32.0,
        strategy: Literal["quadratic", "linear"] = "quadratic",  # masks behind every node, or behind the deepest only
        sampler: bool = True,  # a head that reads the token before, too
        loss: Loss = "cross_entropy",
        consistency: float = 1.0,
        mask_ratio: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for key, value, least in (("num_masks", num_masks, 1), ("rank", rank, 0)):
            if value < least:
                raise UserError(f"drafter.{key}={value}: use {least} or more")
        if not mask_ratio > 0:
            raise UserError(f"drafter.mask_ratio={mask_ratio}: use more than 0")
        if not consistency >= 0:
            raise UserError(f"drafter.consistency={consistency}: use 0 or more")
        self.num_masks, self.rank, self.alpha, self.strategy = num_masks, rank, alpha, strategy
        self.divergence, self.consistency, self.mask_ratio, self.seed = loss, consistency, mask_ratio, seed
        # Masks behind every node are ready whatever is accepted; behind one node, the host must know whether they are.
        capture = Capture(carried=("states", "ready_at")) if strategy == "quadratic" else None
        self.abilities = Abilities(capture=capture, adapts_layers=rank > 0, prefill=GatedLora.prefill)
        self.head, self.path = target.head, target.path
        inside = {id(module) for module in target.layers.modules() if isinstance(module, nn.Linear)}
        linears: dict[str, Any] = {name: m for name, m in target.model.named_modules() if rank and id(m) in inside}
        self.names = list(linears)  # of the target's linears that LoRA acts on
        self.factors = nn.ModuleList(LoraFactors(linear, rank) for linear in linears.values())
        self.masks = nn.Parameter(torch.zeros(num_masks, target.width))
        self.sampler = Sampler(target.width) if sampler else None
        self.states: Tensor | None = None  # [B, hosts, K, D] of the masks of this round's tree
        self.ready_at: Tensor | None = None  # [B] how much was committed when the states were those behind it; -1 never
        self.hosts: Tensor | None = None  # [B, hosts] the nodes that masks stand behind
        self.numbers: Tensor | None = None  # [B, N] which mask a node is

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the masks near the mean embedding; a forward without LoRA and a sampler that adds nothing need no more."""
        with torch.no_grad():
            self.masks.copy_(start_masks(self.head.embedding, self.num_masks))

    # Saved so that peft can read it

    def adapter_layout(self) -> dict[str, tuple[str, str]]:
        """The LoRA factors go to peft's file, under its names."""
        return {
            f"factors.{number}.{factor}.weight": (
                "adapter_model.safetensors",
                f"base_model.model.{name}.{factor}.weight",
            )
            for number, name in enumerate(self.names)
            for factor in ("lora_A", "lora_B")
        }

    def adapter_config(self) -> str:
        """peft's own description of the adapter. It says nothing of the gate: applied everywhere, it is another model."""
        modules = sorted({name.rpartition(".")[2] for name in self.names})
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=modules, task_type="CAUSAL_LM", inference_mode=True,
            base_model_name_or_path=self.path,
        )  # fmt: skip
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
        return json.dumps(plain, indent=2, sort_keys=True) + "\n"

    # The gate

    @contextmanager
    def gated(self, target: Target, numbers: Tensor, rows: Tensor | None = None) -> Iterator[None]:
        """Run the target with mask vectors and LoRA where `numbers` [B, N] names a mask; elsewhere nothing is added. Where the
        masks' places among all B N tokens are said, nothing is asked."""
        rows = (numbers >= 0).flatten().nonzero()[:, 0] if rows is None else rows

        def added(name: str, factors: nn.Module) -> Any:
            scale = self.alpha / self.rank

            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Tensor:
                flat = args[0].flatten(0, -2)
                if not isinstance(output, Tensor) or len(flat) != numbers.numel():
                    raise UserError(
                        f"drafter=gated_lora: {name} of {target.name} does not run token by token; use another family"
                    )
                update = scale * factors(flat.index_select(0, rows))
                return output.flatten(0, -2).index_add(0, rows, update.to(output.dtype)).view_as(output)

            return hook

        with ExitStack() as stack:
            stack.enter_context(mask_embeddings(target.head.embedding, self.masks, numbers))
            if len(rows):
                for name, factors in zip(self.names, self.factors):
                    stack.callback(target.model.get_submodule(name).register_forward_hook(added(name, factors)).remove)
            yield

    # Training

    @property
    def stages(self) -> list[Stage]:
        """Without features: the target runs in the loss, with masks."""
        return [Stage.whole(self, ())]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        blocks = add_blocks(batch, self.prefixes(batch, state.step))
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
        hits = torch.zeros(self.num_masks, device=right.device).index_add(0, numbers, right)
        counts = torch.zeros_like(hits).index_add(0, numbers, torch.ones_like(right))
        return Losses(terms, hits, counts)

    def prefixes(self, batch: Batch, step: int) -> list[list[tuple[int, int]]]:
        """Random prefixes of every sequence with an answer for one of their masks, drawn for its own tokens and the step."""
        rows = []
        for tokens, mask in batch.sequences():
            ends = prefix_ends(mask, self.num_masks)
            length = int(tokens.nonzero()[-1]) + 1 if tokens.any() else 0  # without padding
            source = sequence_generator(MASKED_PREFIXES, self.seed, tokens, step)
            count = max(1, int(self.mask_ratio * length / self.num_masks))
            chosen = ends[torch.randperm(len(ends), generator=source)[:count]].sort().values
            rows.append([(end, self.num_masks) for end in chosen.tolist()])
        return rows

    # Decoding

    def drafting_layers(self) -> nn.Module:
        """A draft step reads the head, and the sampler; the masks have run with the verification before."""
        return nn.ModuleList([self.head.output, *([] if self.sampler is None else [self.sampler])])

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """The first round's masks stand right behind each prompt: nothing committed sees them, and the cache keeps none."""
        places = lengths[:, None] + torch.arange(self.num_masks, device=tokens.device)
        padded = F.pad(tokens, (0, self.num_masks))
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
        assert self.states is not None and self.ready_at is not None
        if context.cache.bound is not None and self.strategy == "quadratic":
            return Draft(_Masks(self, self.states, context.root), complete=self._with_masks)  # every row is ready
        ready = self.ready_at == context.cache.lengths
        if not ready.any():
            children = context.builder.children
            q = None if children == "deterministic" else context.fresh.hidden.new_zeros(len(ready), 1, self.head.vocab_size)
            return Draft(complete=lambda root: self._with_masks(replace(root, children=children, q=q)))

        def complete(tree: TokenTree) -> TokenTree:
            first = torch.arange(tree.tokens.shape[1], device=ready.device) == 0
            return self._with_masks(tree.select(tree.valid & (ready[:, None] | first)))

        return Draft(_Masks(self, self.states, context.root), complete=complete)

    def _with_masks(self, tree: TokenTree) -> TokenTree:
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
        return TokenTree(
            torch.cat([tree.tokens, nothing], dim=1),
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
        assert self.states is not None and self.hosts is not None
        last = accepted.path.gather(1, (accepted.counts - 1)[:, None])
        found = self.hosts == last
        index = found.long().argmax(-1)[:, None, None, None].expand(-1, 1, *self.states.shape[2:])
        self.states = self.states.gather(1, index)[:, 0]
        self.ready_at = torch.where(found.any(-1), context.cache.lengths, -1)


class _Masks(DepthRollout):
    """One round: the mask of a depth, and with a sampler the token before."""

    def __init__(self, drafter: GatedLora, states: Tensor, root: Tensor) -> None:
        super().__init__(root, drafter.num_masks)
        self.drafter, self.states = drafter, states  # [B, K, D]

    def after(self, depth: Tensor, tokens: Tensor) -> Tensor:
        drafter = self.drafter
        states = self.states.gather(1, depth[..., None].expand(-1, -1, self.states.shape[-1]))
        if drafter.sampler is not None:
            states = drafter.sampler(states, drafter.head.embed(tokens)).to(self.states.dtype)
        return drafter.head.logits(states.to(drafter.head.output.weight.dtype)).log_softmax(-1)
