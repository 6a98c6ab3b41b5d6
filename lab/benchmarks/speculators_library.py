"""EAGLE-3 of the speculators library: its model, loss, optimizers and schedule, driven batch by
batch.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from transformers import LlamaConfig, get_linear_schedule_with_warmup

from spectrain.features.batch import Batch
from spectrain.models.features import Features
from spectrain.models.target import Target

# What its command line sets: Muon with AdamW for norms, embeddings and the head.
DEFAULT_OPTIMIZER = {
    "optimizer": "muon",
    "lr": 1e-3,
    "weight_decay": 0.01,
    "muon_lr": 1e-3,
    "muon_momentum": 0.95,
    "muon_weight_decay": 0.1,
    "muon_ns_steps": 5,
    "muon_adjust_lr_fn": "match_rms_adamw",
}


class LibraryTraining:
    """A training by the library: warm-up over 1 % of the steps, then a linear decay; gradients
    clipped at 1.
    """

    def __init__(
        self,
        target: Target,
        draft_ids: Tensor,
        layers: tuple[int, ...],
        unrolled: int,
        num_steps: int,
        optimizer: dict[str, Any] | None = None,
    ) -> None:
        self.model = make_model(target, draft_ids, layers, unrolled)
        self.unrolled = unrolled
        self.loss: Any = resolve_loss_config("kl_div", "eager")
        self.optimizers = build_optimizers(
            self.model, SimpleNamespace(**DEFAULT_OPTIMIZER | (optimizer or {}))
        )
        self.schedules = [
            get_linear_schedule_with_warmup(part, round(0.01 * num_steps), num_steps)
            for part in self.optimizers
        ]
        self.autocast = partial(
            torch.autocast, "cpu", torch.bfloat16, target.dtype == torch.bfloat16
        )

    def train_step(self, inputs: dict[str, Any]) -> None:
        """Update the weights by the loss of a batch."""
        with self.autocast():
            _, loss, _ = self.model(**inputs, ttt_steps=self.unrolled, loss_config=self.loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part in (*self.optimizers, *self.schedules):
            part.step()
        self.model.zero_grad()


def make_model(target: Target, draft_ids: Tensor, layers: tuple[int, ...], unrolled: int) -> Any:
    """Make the library's EAGLE-3 for a target, over a draft vocabulary, with the defaults of its
    command line.
    """
    config: Any = target.model.config
    config = LlamaConfig(
        **{
            key: value
            for key, value in config.to_diff_dict().items()
            if key not in ("model_type", "architectures")
        }
    )
    config.num_hidden_layers = 1
    config.layer_types = ["full_attention"]
    drafted = torch.zeros(target.head.vocab_size, dtype=torch.bool)
    drafted[draft_ids] = True
    return Eagle3DraftModel.from_training_args(
        config,
        t2d=drafted,
        d2t=draft_ids - torch.arange(len(draft_ids)),
        draft_vocab_size=len(draft_ids),
        ttt_steps=unrolled,
        verifier_name_or_path=target.path,
        target_layer_ids=list(layers),
        draft_attn_impl="eager",
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
    )


def shift_batch(
    batch: Batch, features: Features, layers: tuple[int, ...], num_layers: int
) -> dict[str, Any]:
    """Return a packed batch in the form of the library's trainer: features at t with token t +
    1, document by document.
    """
    assert batch.lengths is not None
    last = features.at_layer(num_layers)
    ends = torch.tensor(batch.lengths).cumsum(0)
    # Positions that another position of the same document follows.
    has_next = torch.ones(batch.tokens.shape[1], dtype=torch.bool)
    has_next[ends - 1] = False
    rows = has_next.nonzero()[:, 0]
    documents = torch.repeat_interleave(torch.arange(len(ends)), torch.tensor(batch.lengths))
    return {
        "hidden_states": features.fuse_layers(layers)[:, rows],
        "input_ids": batch.tokens[:, rows + 1],
        "document_ids": documents[None, rows],
        "loss_mask": batch.loss_mask[:, rows + 1],
        "position_ids": batch.positions[:, rows + 1],
        "verifier_last_hidden_states": last[:, rows + 1],
    }
