"""What a training checks before it writes anything: whether family, source, data and processes
support its settings.
"""

from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, adapts_layers
from spectrain.errors import UserError
from spectrain.features.base import Source
from spectrain.models.target import Target

from .parallel.base import ParallelStrategy
from .settings import TrainerSettings


def check_family(
    trainer: TrainerSettings, drafter: Drafter, source: Source, shared: ParallelStrategy
) -> None:
    """Raise a UserError where the drafter family does not support these settings."""
    if source.uses_drafter and not shared.unsharded:
        raise UserError(
            f"trainer.sharding={shared.name}: the drafter writes text here, and no process "
            "has all of it; use ddp, zero2 or source.by=target"
        )
    if trainer.loss_tokens is not None and source.generates_text:
        raise UserError(
            f"trainer.loss_tokens={trainer.loss_tokens}: this source writes text and has loss on "
            "what it writes; leave it out"
        )
    if trainer.optimizer.needs_matrices and not shared.full_parameters:
        raise UserError(
            f"optimizer={trainer.optimizer.name}: with trainer.sharding={shared.name} no process "
            "holds a weight as the matrix that it is; use trainer.sharding=ddp or "
            "optimizer=adamw"
        )
    if trainer.gradient_checkpointing and adapts_layers(drafter):
        raise UserError(
            "trainer.gradient_checkpointing=true: this family adds to the target's layers "
            "while they run, so they cannot be run again; leave it out and lower "
            "trainer.batch_tokens"
        )


def check_validations(
    trainer: TrainerSettings, shared: ParallelStrategy, dataset: Dataset, target: Target
) -> None:
    """Raise a UserError where a setting lacks held-out data, a target and a drafter that decode,
    or full parameters.
    """
    for key in ("keep_best", "stop_after", "eval_every"):
        value = getattr(trainer, key)
        if value:
            target.require_layers(f"trainer.{key}={value}")
        if value and not dataset.held_out:
            raise UserError(
                f"trainer.{key}={value}: nothing is held out to look at; raise the share, as "
                "in data.held_out=0.1"
            )
        if value and not shared.unsharded:
            raise UserError(
                f"trainer.{key}={value}: with trainer.sharding={shared.name} no process can "
                "draft while it trains; use ddp or zero2, or leave it out"
            )
    if trainer.ema is not None and not shared.full_parameters:
        raise UserError(
            f"trainer.ema={trainer.ema}: with trainer.sharding={shared.name} no process holds "
            "all weights; use ddp, or leave it out"
        )
