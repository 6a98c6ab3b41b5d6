"""A draft model that learns to ask the target for tokens (knowledge distillation with training
wheels, arXiv 2502.17717).

Shapes: B batch, T tokens, R supervised rows, W width of the drafter's state, F frontier nodes, V
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.values import Count, Positive
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.causal import Causal, StopHead
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import Projection, split_rows
from spectrain.models.forward_plan import ForwardPlan
from spectrain.trees.rollout import Draft, Rollout

from .losses import asking_error, span_errors, writing_error

if TYPE_CHECKING:
    from spectrain.models.target import Target

# An optimizer's step of 1e-3 moves the price by about 0.03.
PRICE_SPEED = 30.0


class TrainingWheels(Causal):
    """A small LM that writes by itself and asks the target where it is unsure.

    A linear head gives the probability g of asking. A vocabulary with a further entry for asking
    has the same distributions. Another head gives the value of a state. The loss is the squared
    inconsistency of writing the text's next token and of asking for it, each with the `span` - 1
    tokens that are written after it (`losses.py`). The price of
    asking rises while g is above `asks` on average and falls below it, as the multiplier of a
    constraint does. Texts should be the target's own answers (spectrain data regenerate).

    A draft ends where asking is likelier than writing. With tree=chain acceptance=unverified it
    stays as it is, and the target writes the token that was asked for: the answer is the student's
    with the teacher's help (LOSSY). With a lossless rule the answer is the target's.
    """

    saved = SavedFiles(shape=("architecture", "num_layers", "model"))

    def __init__(
        self,
        target: Target,
        # Share of the tokens for which the drafter may ask on average, between 0 and 1.
        asks: Positive = 0.2,
        # Weight of asking's inconsistency beside that of writing.
        ask_weight: Positive = 1.0,
        # Number of the target's layers to copy, evenly spaced with the first and the last; null
        # when model or architecture gives the drafter.
        num_layers: int | None = None,
        # Directory or hub name of a small causal model to start from; null when num_layers or
        # architecture gives the drafter.
        model: str | None = None,
        # Transformers configuration of a new, random model; null when num_layers or model gives the
        # drafter.
        architecture: dict[str, Any] | None = None,
        # Number of successive actions over which the loss is consistent; 1 takes each by itself.
        span: Count = 1,
    ) -> None:
        super().__init__(target, num_layers, model, architecture)
        self.span = span
        if not asks < 1:
            raise UserError(f"drafter.asks={asks}: it is a share of the tokens; use less than 1")
        self.asks = asks
        self.ask_weight = ask_weight
        # Its logit is that of writing, the negative of the logit of asking.
        self.stop_head = StopHead(self.model.width, 0)
        nn.init.constant_(self.stop_head.output.bias, math.log((1 - asks) / asks))
        self.value_head = nn.Linear(self.model.width, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.price_weight = nn.Parameter(torch.zeros(1))

    @property
    def price(self) -> Tensor:
        """What asking for a token costs [1], in nats."""
        return F.softplus(PRICE_SPEED * self.price_weight)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return half the squared inconsistencies of the spans of supervised tokens, and the term
        by which the price follows the share of asking.
        """
        assert batch.features is not None
        predicts = batch.next_is_supervised
        plan = ForwardPlan(
            layers=("final",), grad=torch.is_grad_enabled(), recompute=state.recompute
        )
        final = self.model.run(batch.tokens, batch.plan_forward(plan)).at_layer("final")
        next_tokens = batch.tokens.roll(-1, dims=1)[predicts]
        heads = self.value_head.weight.dtype
        values = self.value_head(final.to(heads))[..., 0].float()
        # After an answer's last token nothing is gained any more.
        values_after = (values * predicts).roll(-1, dims=1)
        states = final[predicts]
        assert self.stop_head is not None
        ask_logits = -self.stop_head(states).float()
        drafter_head, target_head = self.output_layers
        student, predictions = token_log_probs(states, drafter_head, next_tokens)
        with torch.no_grad():
            teacher, labels = token_log_probs(
                batch.features.at_layer("final")[predicts], target_head, next_tokens
            )
        drop = (values - values_after)[predicts]
        weight = batch.row_loss(predicts).weight
        weight = torch.ones_like(drop) if weight is None else weight
        writing = writing_error(drop, ask_logits, student, teacher)
        asking = asking_error(drop, ask_logits, self.price.detach())
        writing, asking = (
            span_errors(first, writing, predicts, self.span) for first in (writing, asking)
        )
        surplus = ask_logits.detach().sigmoid() - self.asks
        terms = {
            "writing": (weight * writing.square()).sum() / 2,
            "asking": self.ask_weight * (weight * asking.square()).sum() / 2,
            # A step down this term raises the price where the drafter asks too often.
            "price": -(weight * surplus).sum() * self.price[0],
        }
        terms |= batch.text_terms(states, drafter_head, next_tokens)
        hits = (predictions == labels).sum()[None].float()
        return Losses(terms, hits, torch.full_like(hits, len(next_tokens)))

    def draft(self, context: Context) -> Draft:
        """Draft as a small LM does, up to the first token that the drafter asks for."""
        draft = super().draft(context)
        assert draft.rollout is not None
        return replace(draft, rollout=AskingRollout(draft.rollout))


class AskingRollout(Rollout):
    """The rollout of a small LM that stops where asking is likelier than writing."""

    def __init__(self, inner: Rollout) -> None:
        self.inner = inner

    def start(self) -> Tensor:
        return self.stop_where_asking(self.inner.start())

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.stop_where_asking(self.inner.extend(tokens, parents))

    def stop_where_asking(self, log_q: Tensor) -> Tensor:
        """Mark the newest nodes after which the drafter asks; return log q [B, F, V]."""
        assert self.inner.accept_probs is not None
        self.stop_mask = self.inner.accept_probs < 0.5
        return log_q


def token_log_probs(states: Tensor, head: Projection, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [R] of tokens after states [R, D], and the likeliest tokens
    [R]. Logits exist for some rows at a time.
    """

    def judge(rows: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = head.logits(rows).float().log_softmax(-1)
        return log_probs.gather(1, own[:, None])[:, 0], log_probs.argmax(-1)

    parts = [
        checkpoint(judge, states[rows], tokens[rows], use_reentrant=False)
        for rows in [*split_rows(len(states))] or [slice(0, 0)]
    ]
    log_probs, best = zip(*parts)
    return torch.cat(log_probs), torch.cat(best)
