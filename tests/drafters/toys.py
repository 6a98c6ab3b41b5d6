"""Two small drafters that are unlike each other, to hold the contract to what real families
need.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState
from spectrain.drafters.context import Context
from spectrain.features.batch import Batch
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees import Rollout
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath


def cross_entropy(logits: Tensor, batch: Batch, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of logits [B, T, V] at t for token t + shift, with hits and counts."""
    labels = batch.tokens[:, shift:]
    mask = batch.loss_mask[:, shift:]
    logits = logits[:, : labels.shape[1]][mask]
    loss = F.cross_entropy(logits, labels[mask], reduction="sum")
    return loss, (logits.argmax(-1) == labels[mask]).sum().float(), mask.sum().float()


class FrozenHeads(Drafter):
    """Reads frozen features: head k predicts token t + 2 + k from the target's state at t."""

    layers = ("final",)

    def __init__(self, target: Target, num_heads: int = 2) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(target.width, target.width) for _ in range(num_heads))
        self.head = target.head

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        state = batch.features.at_layer("final")
        parts = [
            cross_entropy(target.head.logits(state + F.silu(m(state))), batch, 2 + k)
            for k, m in enumerate(self.mix)
        ]
        losses, hits, counts = (torch.stack(part) for part in zip(*parts))
        return Losses({f"head{k}": loss for k, loss in enumerate(losses)}, hits.detach(), counts)

    def draft(self, context: Context) -> Draft:
        last = (context.num_new - 1).clamp(min=0)[:, None]
        state = context.new_features.gather(last).at_layer("final")
        return Draft(_Heads(self, state))


class _Heads(Rollout):
    def __init__(self, drafter: FrozenHeads, state: Tensor) -> None:
        self.drafter = drafter
        self.state = state
        self.depth = torch.zeros(len(state), 1, dtype=torch.int64)

    def _log_q(self, depth: Tensor) -> Tensor:
        mix, head = self.drafter.mix, self.drafter.head
        every = torch.stack(
            [head.logits(self.state + F.silu(m(self.state)))[:, 0].log_softmax(-1) for m in mix],
            dim=1,
        )
        return every.gather(
            1, depth.clamp(max=len(mix) - 1)[..., None].expand(-1, -1, every.shape[-1])
        )

    def start(self) -> Tensor:
        return self._log_q(self.depth)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth = self.depth.gather(1, parents) + 1
        self.depth = torch.cat([self.depth, depth], dim=1)
        return self._log_q(depth)


class Independent(Drafter):
    """An independent model with its own cache: it reads no features and catches up on accepted
    tokens by itself.
    """

    def __init__(self, target: Target, width: int = 32) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=target.head.vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=target.max_length,
        )
        config._attn_implementation = ATTENTION_NAME
        self.model = Target(LlamaForCausalLM(config), target.tokenizer, "independent", "")
        self.cache: TreeCache | None = None

    @property
    def stages(self) -> list[Stage]:
        return [Stage([{"params": list(self.parameters())}], self.layers)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        logits = self.model.run(batch.tokens, ForwardPlan(logits=True, grad=True)).logits
        assert logits is not None
        loss, hits, count = cross_entropy(logits, batch, 1)
        return Losses({"cross_entropy": loss}, hits[None], count[None])

    def draft(self, context: Context) -> Draft:
        if context.round == 0 or self.cache is None:
            self.cache = self.model.new_cache(
                len(context.num_new), context.cache.max_length + 1 + context.builder.max_drafted
            )
        # committed tokens that this model has not run yet
        num_uncached = context.cache.lengths - self.cache.lengths
        width = int(num_uncached.max())
        index = (self.cache.lengths[:, None] + torch.arange(width)).clamp(
            max=context.tokens.shape[1] - 1
        )
        self.model.run(context.tokens.gather(1, index), ForwardPlan(cache=self.cache))
        self.cache.commit(torch.arange(width).expand(len(num_uncached), -1), num_uncached)
        return Draft(_Model(self.model, self.cache, context.root))

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.cache is not None
        self.cache.roll_back()


class _Model(Rollout):
    def __init__(self, model: Target, cache: TreeCache, root: Tensor) -> None:
        self.model, self.cache, self.root = model, cache, root
        self.visible = torch.zeros(len(root), 0, 0, dtype=torch.bool)
        self.depth = torch.zeros(len(root), 0, dtype=torch.int64)

    def _run(self, tokens: Tensor, depth: Tensor, above: Tensor) -> Tensor:
        new = tokens.shape[1]
        visible = torch.cat(
            [above, torch.eye(new, dtype=torch.bool).expand(len(tokens), -1, -1)], dim=2
        )
        output = self.model.run(
            tokens,
            ForwardPlan(
                logits=True,
                positions=self.cache.lengths[:, None] + depth,
                mask=visible,
                cache=self.cache,
            ),
        )
        self.visible = torch.cat([F.pad(self.visible, (0, new)), visible], dim=1)
        self.depth = torch.cat([self.depth, depth], dim=1)
        assert output.logits is not None
        return output.logits.log_softmax(-1)

    def start(self) -> Tensor:
        no_parents = torch.zeros(len(self.root), 1, 0, dtype=torch.bool)
        return self._run(
            self.root[:, None], torch.zeros(len(self.root), 1, dtype=torch.int64), no_parents
        )

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self.visible.gather(1, parents[..., None].expand(-1, -1, self.visible.shape[-1]))
        return self._run(tokens, self.depth.gather(1, parents) + 1, above)
