"""The contract between the trainer and the strategies by which processes share a drafter, and
copies as one (DDP).
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spectrain.drafters.base import Drafter, Losses, TrainingState
from spectrain.features.batch import Batch
from spectrain.features.context_piece import ContextGroup
from spectrain.models.target import Target

from ..checkpoints import collect_tensors, flatten_optimizer, unflatten_optimizer
from .step_timer import StepTimer

# Parameter groups of torch.optim: each has `params`.
ParameterGroups = list[dict[str, Any]]
OptimizerFactory = Callable[[ParameterGroups], torch.optim.Optimizer]


class ParallelStrategy(ABC):
    """A drafter in training, shared by the processes of a run."""

    name: str
    # Drafter and target can be used in place after `restore_tensors`.
    is_reusable = True
    # Every process holds all of the drafter while it trains, so that it can also draft.
    unsharded = True
    # Parameters are ordinary full tensors, and torch's own optimizer holds all of its state.
    full_parameters = True

    def __init__(
        self,
        accelerator: Accelerator,
        num_copies: int = 1,
        autocast: torch.dtype | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        self.accelerator, self.autocast = accelerator, autocast
        # The processes that share the columns of a batch with this one; None if it runs all of
        # them.
        self.context = context
        self.rank = accelerator.process_index
        self.num_processes = accelerator.num_processes
        # Neighbouring processes that see the same data, because they share its columns or run the
        # target together.
        self.num_copies = num_copies
        self.data_rank = self.rank // num_copies
        self.num_data_ranks = self.num_processes // num_copies
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process
        self.timer = StepTimer(self.device)
        # The optimizer of the parameters that this process updates.
        self.optimizer: torch.optim.Optimizer

    @property
    def num_loss_parts(self) -> int:
        """The number of processes whose losses add up to the loss of a step; others compute the
        same.
        """
        return self.num_data_ranks * (1 if self.context is None else self.context.size)

    def copy_from_first(self, module: nn.Module) -> None:
        """Give a module the parameters and buffers of the first process, before it is shared."""
        if self.num_processes > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    @abstractmethod
    def set_drafter(self, drafter: Drafter, target: Target) -> None:
        """Take a drafter with the same weights on every process."""

    @abstractmethod
    def start_stage(
        self, groups: ParameterGroups, clip: float, make_optimizer: OptimizerFactory
    ) -> None:
        """Begin a stage with an optimizer of these parameter groups."""

    @abstractmethod
    def loss(self, batch: Batch, state: TrainingState, is_last: bool) -> Losses:
        """Return this process's losses of a batch, which may be the last of a step."""

    @abstractmethod
    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add to the gradients. After the last batch of a step they are averaged over processes."""

    @abstractmethod
    def step(self) -> Tensor:
        """Clip the gradients and step. Return [] bool on any device, whether they are finite; where
        they are not, nothing changes.
        """

    @property
    def steps_without_host(self) -> bool:
        """Whether the optimizer itself leaves a step out whose gradients are not finite, so that
        the host need not know: torch's fused ones do. On a CPU nobody waits for a device.
        """
        return self.device.type != "cpu" and bool(self.optimizer.defaults.get("fused"))

    @abstractmethod
    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Gather parameters and buffers of a module on the CPU, for the main process. Every
        process must call this.
        """

    def gather_trained_weights(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """Gather, for the main process, the drafter and the trained parameters of the target."""
        own = {id(parameter) for parameter in drafter.parameters()}
        weights = {
            f"drafter.{name}": tensor for name, tensor in self.gather_weights(drafter).items()
        }
        trained = {
            name
            for name, tensor in target.named_parameters()
            if tensor.requires_grad and id(tensor) not in own
        }
        if trained:
            weights |= {
                f"target.{name}": tensor
                for name, tensor in self.gather_weights(target).items()
                if name in trained
            }
        return weights

    @abstractmethod
    def gather_optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Gather the optimizer's state on the CPU, numbered as in the groups. Every process must
        call this.
        """

    @abstractmethod
    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Undo `gather_optimizer_state`, on any number of processes."""

    def restore_tensors(self) -> None:
        """Restore full tensors on the main process after training, on the CPU if sharded. Every
        process calls this.
        """

    def all_reduce(self, *values: float) -> list[float]:
        """Sum each of these numbers over the processes that see different data."""
        if self.num_processes == 1:
            return list(values)
        totals = self.accelerator.reduce(
            torch.tensor(values, dtype=torch.float64, device=self.device), "sum"
        )
        return [value / self.num_copies for value in totals.tolist()]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.num_processes == 1:
            return [value]
        gathered: list[Any] = [None] * self.num_processes
        dist.all_gather_object(gathered, value)
        return gathered

    def wait_for_all(self) -> None:
        self.accelerator.wait_for_everyone()


class ReplicatedStrategy(ParallelStrategy):
    """Every process has a full copy of the drafter; gradients are averaged (DDP)."""

    name = "ddp"

    def set_drafter(self, drafter: Drafter, target: Target) -> None:
        self.drafter = drafter.to(self.device)
        self.target = target
        self.model: Any = drafter
        self.gradient_hooks: list[RemovableHandle] = []

    def start_stage(
        self, groups: ParameterGroups, clip: float, make_optimizer: OptimizerFactory
    ) -> None:
        self.clip = clip
        self.optimizer = make_optimizer(groups)
        self._wrap_model()

    def _wrap_model(self) -> None:
        """Wrap the model anew for each stage: DDP registers the parameters that are trained."""
        if self.num_processes > 1 and any(
            parameter.requires_grad for parameter in self.drafter.parameters()
        ):
            device_ids = [self.device] if self.device.type == "cuda" else None
            # DDP searches for unused parameters because it then keeps its first buckets. Otherwise
            # it arranges them anew after the first step, the order in which an exchange adds the
            # processes up depends on the position in a bucket, and a resumed run differs by
            # rounding.
            warnings.filterwarnings("ignore", ".*find_unused_parameters=True was specified")
            self.model = nn.parallel.DistributedDataParallel(
                self.drafter, device_ids=device_ids, find_unused_parameters=True
            )
            # Buffers are constants, such as maps of vocabularies: no forward waits for a broadcast
            # of them. The second name is that of torch before 2.13.
            self.model.forward_sync_buffers = self.model.broadcast_buffers = False
        self._time_gradients()

    def _time_gradients(self) -> None:
        """Mark in every backward pass when the last gradient of this process is there, before
        DDP exchanges it.
        """
        for hook in self.gradient_hooks:
            hook.remove()
        parameters = self.trained_parameters if self.num_processes > 1 else []
        self.gradient_hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _: self.timer.mark("computed"))
            for parameter in parameters
        ]

    def loss(self, batch: Batch, state: TrainingState, is_last: bool) -> Losses:
        wrapped = isinstance(self.model, nn.parallel.DistributedDataParallel)
        autocast = torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None
        )
        with autocast, self.model.no_sync() if wrapped and not is_last else nullcontext():
            # DDP reads in its forward whether gradients will be averaged.
            losses: Losses = self.model(batch, self.target, state)
        return losses

    def backward(self, loss: Tensor, is_last: bool) -> None:
        torch.autograd.backward(loss)

    @property
    def trained_parameters(self) -> list[Any]:
        """Return the parameters that this stage trains, in the order of its groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self) -> Tensor:
        self.timer.mark_first("computed")
        self._average_target_gradients()
        self.timer.mark("exchanged")
        finite = torch.isfinite(self._clip_gradients())
        if self.steps_without_host:
            # As a gradient scaler tells it.
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients and return their norm over all processes before clipping."""
        return torch.nn.utils.clip_grad_norm_(self.trained_parameters, self.clip)

    def _average_target_gradients(self) -> None:
        """Average the gradients of the target's own parameters over processes: they are outside of
        the wrapped drafter.

        A parameter of a layer that this process dropped for all sequences has a gradient of zero.
        """
        own = {id(parameter) for parameter in self.drafter.parameters()}
        target_parameters = [
            parameter for parameter in self.trained_parameters if id(parameter) not in own
        ]
        for parameter in target_parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.num_processes == 1 or not target_parameters:
            return
        # A few large exchanges instead of hundreds of small ones.
        for start in range(0, len(target_parameters), 64):
            part = target_parameters[start : start + 64]
            flat = self.accelerator.reduce(
                torch.cat([p.grad.flatten() for p in part]), reduction="mean"
            )
            for parameter, mean in zip(part, flat.split([parameter.numel() for parameter in part])):
                parameter.grad = mean.view_as(parameter)

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        return collect_tensors(module)

    def gather_optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        return flatten_optimizer(self.optimizer)

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        unflatten_optimizer(self.optimizer, tensors, numbers)
