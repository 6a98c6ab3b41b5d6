"""A separate small causal LM as drafter, distilled from the target (GKD, Agarwal et al., 2024;
DistillSpec, Zhou et al., 2024).

Shapes: B batch, T tokens, V vocabulary, R supervised rows, W width of the drafter's state, F
frontier nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Count, Positive
from spectrain.drafters.layers.losses import LossName, acceptance_rate, head_loss
from spectrain.drafters.layers.small_models import (
    Blocks,
    SmallModelDrafter,
    make_small_model,
    names_gguf_file,
)
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget, split_rows
from spectrain.models.architectures.quantized import has_block_weights
from spectrain.models.fast import cut_output
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import BranchVisibility, Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath

from .base import Losses, TrainingState
from .capabilities import Capabilities, Capture, SavedFiles
from .context import Context
from .step_cost import BatchShape, Judged, Run, StepCost

# loss weight of a rejected token relative to an accepted one: the paper's best
REJECTION_WEIGHT = 6.0


class StopHead(nn.Module):
    """SpecDec++'s head (Huang et al., 2024, section 3.2): `num_layers` residual blocks h + SiLU(W
    h) and a linear layer.

    The paper predicts the acceptance of a drawn token. This head predicts alpha = sum_v min(p(v),
    q(v)), the probability that a token drawn from q is accepted, before the draw. So every token
    that a stopped chain has drawn is verified.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        if num_layers < 0:
            raise UserError(
                f"drafter.stop_head={num_layers}: use 0 for a linear head, or the number of its "
                "hidden layers"
            )
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the logit [..] of the acceptance probability of states [.., W]."""
        states = states.to(self.output.weight.dtype)
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return self.output(states)[..., 0]

    def loss(
        self, states: Tensor, drafter_log_probs: HeadTarget, target_log_probs: HeadTarget
    ) -> Tensor:
        """Return the summed loss -alpha log c - REJECTION_WEIGHT (1 - alpha) log(1 - c) of states
        [R, W], which get no gradient."""
        alpha = torch.cat(
            [
                acceptance_rate(target_log_probs(rows), drafter_log_probs(rows))
                for rows in [*split_rows(len(states))] or [slice(0, 0)]
            ]
        )
        logits = self(states.detach())
        return (
            -alpha * F.logsigmoid(logits) - REJECTION_WEIGHT * (1 - alpha) * F.logsigmoid(-logits)
        ).sum()


class Causal(SmallModelDrafter):
    """A small LM with the target's tokenizer, which drafts one token per forward.

    It starts from one of three origins: `num_layers` of the target, evenly spaced with its first
    and last, and its embeddings; `model`, a directory or a name on the hub; or `architecture`, a
    transformers configuration with random weights.

    The loss is the divergence `loss` between the target's and the drafter's distributions, both at
    `loss_temperature`, at every token of the assistant. jensen_shannon is the generalised one with
    `beta`, scaled by 1 / (beta (1 - beta)), so that the learning rates of KL fit it too. The source
    sets the sequences: source=live those of the data.

    With `stop_head` a second head learns the acceptance probability of the drafter's tokens
    (SpecDec++), with which tree=chain tree.stop=0.3 ends a chain.
    """

    saved = SavedFiles(shape=("architecture", "num_layers", "model", "stop_head"))
    capabilities = Capabilities(
        drafts_from_features=True, capture=Capture(state_names=("cache",)), scores_path_at_once=True
    )

    def __init__(
        self,
        target: Target,
        # Number of the target's layers to copy, evenly spaced with the first and the last; null
        # when model or architecture gives the drafter.
        num_layers: int | None = None,
        # Directory, .gguf file or hub name of a small causal model to start from, or the name of
        # one that make models downloads; null when num_layers or architecture gives the drafter.
        model: str | None = None,
        # Transformers configuration of a new, random model; null when num_layers or model gives the
        # drafter.
        architecture: dict[str, Any] | None = None,
        # Divergence between the target's and the drafter's next-token distributions.
        loss: LossName = "forward_kl",
        # Interpolation weight of the generalised Jensen-Shannon loss, between 0 and 1; other losses
        # ignore it.
        beta: float = 0.5,
        # Temperature of both distributions in the loss, above 0.
        loss_temperature: Positive = 1.0,
        # Number of hidden layers of a head that predicts whether a token is accepted (SpecDec++);
        # null trains no such head.
        stop_head: int | None = None,
        # How the weights of a .gguf file in drafter.model lie in memory: gguf keeps its blocks,
        # which draft on a CPU from inputs in 8 bits, q4_0 also rounds those of more bits to 4, none
        # makes them dense, and auto keeps them where the target's are kept. Training makes them
        # dense.
        quantization: Literal["auto", "gguf", "q4_0", "none"] = "auto",
        # Number of tokens that may be drafted, those with the lowest ids, which tokenizers give to
        # frequent tokens; the output layer computes no others. Null drafts all; training ignores
        # it.
        vocab_size: Count | None = None,
    ) -> None:
        super().__init__()
        if not 0 < beta < 1:
            raise UserError(
                f"drafter.beta={beta}: use more than 0 and less than 1; the ends are forward_kl "
                "and reverse_kl"
            )
        self.divergence = loss
        self.beta = beta
        self.loss_temperature = loss_temperature
        self.model_name = model
        blocks = choose_blocks(target, model, quantization)
        self.add_model(target, num_layers, model, architecture, blocks)
        self.capabilities = replace(
            self.capabilities, rewind=type(self).rewind, prepare_kernels=cut_draft_outputs
        )
        self.stop_head = None if stop_head is None else StopHead(self.model.width, stop_head)
        self.num_drafted = min(self.vocab_size, vocab_size or self.vocab_size)
        self.nodes: _Nodes | None = None
        # The output layer of these tokens alone, which is no part of the drafter's weights.
        self.draft_outputs: list[nn.Linear] = []

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Load weights that lie in blocks anew, because training changes them."""
        if has_block_weights(self.model):
            self.model = make_small_model(target, None, self.model_name, None)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the model's layers over all tokens; no distribution is cut to a
        draft vocabulary.
        """
        judged = Judged(
            batch.supervised, target.head.vocab_size, batch.supervised, copies=1, label_copies=1
        )
        return StepCost([Run(self.model.layers, batch.tokens, batch.length)], judged)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the divergence at the supervised positions [R], with the losses of the stop
        head and those of the batch if used.
        """
        assert batch.features is not None
        predicts = batch.next_is_supervised
        grad = torch.is_grad_enabled()
        plan = ForwardPlan(layers=("final",), grad=grad, recompute=state.recompute)
        features = self.model.run(batch.tokens, batch.plan_forward(plan))
        states = select_rows(features.at_layer("final"), predicts)
        next_tokens = select_rows(batch.tokens.roll(-1, dims=1), predicts)
        rows = batch.row_loss(predicts)
        drafter_head, target_head = (
            head.at_temperature(self.loss_temperature) for head in self.output_layers
        )
        log_probs = HeadTarget(select_rows(batch.features.at_layer("final"), predicts), target_head)
        judged = head_loss(
            self.divergence,
            states,
            drafter_head,
            next_tokens,
            log_probs,
            rows,
            self.beta,
            rows.weight,
        )
        hits = (judged.predictions == judged.labels).sum()[None].float()
        terms: dict[str, Tensor] = {self.divergence: judged.loss}
        if self.stop_head is not None:
            terms["stop"] = self.stop_head.loss(
                states, HeadTarget(states.detach(), drafter_head), log_probs
            )
        terms |= batch.text_terms(states, drafter_head, next_tokens)
        return Losses(terms, hits, torch.full_like(hits, len(next_tokens)))

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Run the tokens that the model has not read, the root last, and draft after the root."""
        cache, num_unread = self.open_cache(context, 1 + context.builder.max_drafted)
        most_unread = context.new_features.tokens.shape[1]
        if self.keeps_nodes:
            most_unread = int(num_unread.max())
        steps = torch.arange(most_unread + 1, device=num_unread.device)
        positions = cache.lengths[:, None] + steps
        tokens = context.tokens.gather(1, positions.clamp(max=context.tokens.shape[1] - 1))
        states = self.run_tokens(tokens, ForwardPlan(layers=("final",), cache=cache))
        cache.commit(None, num_unread + 1)
        root = states.gather(1, num_unread[:, None, None].expand(-1, 1, states.shape[-1]))
        self.nodes = _Nodes(self, cache, root)
        return Draft(self.nodes)

    @property
    def keeps_nodes(self) -> bool:
        """Whether accepted nodes stay in the cache, so that the next round does not run them again:
        on a CPU, where a row costs time. Captured rounds have a fixed number of rows, and on a GPU
        the number of rows would have to be read from it."""
        assert self.cache is not None
        return not self.cache.is_bounded and self.cache.lengths.device.type == "cpu"

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.cache is not None
        if self.nodes is None or not self.keeps_nodes:
            # The root is run again in the next round: in a row that is done, the next round has
            # the same root.
            self.cache.roll_back(committed=1)
            return
        self.cache.commit(*self.nodes.find_path(context))
        # In a row that is done, the next round has the same root.
        self.cache.crop(self.cache.lengths.minimum(context.cache.lengths))

    def rewind(self, lengths: Tensor) -> None:
        """Cut the cache to these lengths [B]."""
        assert self.cache is not None
        self.cache.crop(lengths)

    def log_q(self, final: Tensor) -> Tensor:
        """Compute log q, [B, F, D] -> [B, F, V]."""
        head = self.model.head
        if self.draft_outputs:
            logits = head.scale_and_cap(self.draft_outputs[0](final).float())
        else:
            logits = head.logits(final)
        return logits[..., : self.num_drafted].log_softmax(-1)


def choose_blocks(target: Target, model: str | None, quantization: str) -> Blocks | None:
    """Return the blocks in which the weights of a small model stay; None makes them dense. Raise
    UserError where blocks were asked of a source other than a GGUF file.
    """
    is_gguf = model is not None and names_gguf_file(model)
    if quantization not in get_args(Blocks):
        keeps = quantization == "auto" and is_gguf and has_block_weights(target.model)
        return "gguf" if keeps else None
    if not is_gguf:
        raise UserError(
            f"drafter.quantization={quantization}: drafter.model names no .gguf file; leave it "
            "out, or name the file"
        )
    return cast(Blocks, quantization)


def cut_draft_outputs(drafter: Causal) -> None:
    """Cut the output layer to the tokens that are drafted, where these are not all."""
    drafter.draft_outputs = []
    if drafter.num_drafted < drafter.vocab_size:
        drafter.draft_outputs = [cut_output(drafter.model.head.output, drafter.num_drafted)]


class _Nodes(Rollout):
    """The rollout of one round, whose nodes follow the tokens in the drafter's cache, the root
    included.
    """

    def __init__(self, drafter: Causal, cache: TreeCache, root: Tensor) -> None:
        self.drafter, self.cache, self.root = drafter, cache, root  # [B, 1, D]
        self.branches = BranchVisibility(len(root), root.device)
        self.tokens = root.new_empty(len(root), 0, dtype=torch.int64)  # [B, nodes so far]
        self.parents = self.tokens

    def start(self) -> Tensor:
        return self.log_q_and_stop(self.root)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.add_nodes(tokens, parents)
        return self.run(tokens, *self.branches.add_nodes(parents))

    def extend_levels(self, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
        tokens, parents = (list(parts) for parts in zip(*levels))
        joined = torch.cat(tokens, dim=1)
        self.add_nodes(joined, torch.cat(parents, dim=1))
        return self.run(joined, *self.branches.add_levels(parents))

    def add_nodes(self, tokens: Tensor, parents: Tensor) -> None:
        """Remember nodes [B, F], whose parents count the root as 0, where they may stay."""
        if not self.drafter.keeps_nodes:
            return
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)

    def find_path(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return the nodes [B, P] that hold the tokens which the last round committed after its
        root, and their number [B]. A node without one ends a path, such as a leaf, which was not
        run, or a copied token.
        """
        ends = context.cache.lengths.tolist()
        starts = (context.cache.lengths - context.num_new).tolist()
        paths: list[list[int]] = []
        for row, nodes in enumerate(zip(self.parents.tolist(), self.tokens.tolist())):
            numbers = {node: number for number, node in enumerate(zip(*nodes))}
            path: list[int] = []
            for token in context.tokens[row, starts[row] + 1 : ends[row]].tolist():
                number = numbers.get((path[-1] + 1 if path else 0, token))
                if number is None:
                    break
                path.append(number)
            paths.append(path)
        longest = max(map(len, paths))
        padded = [path + [0] * (longest - len(path)) for path in paths]
        counts = self.tokens.new_tensor([len(path) for path in paths])
        return self.tokens.new_tensor(padded).view(len(paths), longest), counts

    def run(self, tokens: Tensor, depth: Tensor, visible: Tensor) -> Tensor:
        """Return log q [B, F, V] after new nodes at depths [B, F], which attend to nodes by the
        mask `visible`.
        """
        positions = self.cache.lengths[:, None] - 1 + depth
        plan = ForwardPlan(layers=("final",), positions=positions, mask=visible, cache=self.cache)
        return self.log_q_and_stop(self.drafter.run_tokens(tokens, plan))

    def log_q_and_stop(self, states: Tensor) -> Tensor:
        """Return log q [B, F, V] from the states [B, F, D] of nodes, and set their acceptance
        probabilities.
        """
        if self.drafter.stop_head is not None:
            self.accept_probs = self.drafter.stop_head(states).float().sigmoid()
        return self.drafter.log_q(states)
