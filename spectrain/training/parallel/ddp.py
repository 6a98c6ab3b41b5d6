"""Copies of the drafter on every process, whose gradients are averaged (DDP); on one process, the drafter as it is."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Drafter, Losses, TrainingState
from spectrain.features.batch import Batch
from spectrain.models.target import Target

from ..checkpoints import collect_tensors, flatten_optimizer, unflatten_optimizer
from ..optimizers import OptimizerFactory, ParameterGroups
from .base import ParallelStrategy


class ReplicatedStrategy(ParallelStrategy):
    """Every process has a full copy of the drafter; gradients are averaged (DDP)."""

    name = "ddp"

    def set_drafter(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter.to(self.device), target
        self.model: Any = drafter

    def start_stage(self, groups: ParameterGroups, clip: float, make_optimizer: OptimizerFactory) -> None:
        self.clip = clip
        self.optimizer = make_optimizer(groups)
        self._wrap_model()

    def _wrap_model(self) -> None:
        """Wrap the model anew for each stage: DDP registers the parameters that are trained."""
        if self.num_processes > 1 and any(parameter.requires_grad for parameter in self.drafter.parameters()):
            device_ids = [self.device] if self.device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(self.drafter, device_ids=device_ids)

    def loss(self, batch: Batch, state: TrainingState, is_last: bool) -> Losses:
        wrapped = isinstance(self.model, nn.parallel.DistributedDataParallel)
        autocast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)
        with autocast, self.model.no_sync() if wrapped and not is_last else nullcontext():
            losses: Losses = self.model(
                batch, self.target, state
            )  # which is where DDP reads whether gradients will be averaged
        return losses

    def backward(self, loss: Tensor, is_last: bool) -> None:
        torch.autograd.backward(loss)

    @property
    def trained_parameters(self) -> list[Any]:
        """Return the parameters that this stage trains, in the order of its groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self) -> bool:
        self._average_target_gradients()
        finite = bool(torch.isfinite(self._clip_gradients()))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients and return their norm over all processes before clipping."""
        return torch.nn.utils.clip_grad_norm_(self.trained_parameters, self.clip)

    def _average_target_gradients(self) -> None:
        """Average the gradients of the target's own parameters over processes: they are not in what is wrapped.

        A parameter that no sequence of this process went through, its layer dropped, has a gradient of zero.
        """
        own = {id(parameter) for parameter in self.drafter.parameters()}
        target_parameters = [parameter for parameter in self.trained_parameters if id(parameter) not in own]
        for parameter in target_parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.num_processes == 1 or not target_parameters:
            return
        for start in range(0, len(target_parameters), 64):  # a few large exchanges instead of hundreds of small ones
            part = target_parameters[start : start + 64]
            flat = self.accelerator.reduce(torch.cat([p.grad.flatten() for p in part]), reduction="mean")
            for parameter, mean in zip(part, flat.split([parameter.numel() for parameter in part])):
                parameter.grad = mean.view_as(parameter)

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        return collect_tensors(module)

    def gather_optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        return flatten_optimizer(self.optimizer)

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        unflatten_optimizer(self.optimizer, tensors, numbers)
