"""The contract between the trainer and the strategies by which processes share a drafter."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from spectrain.drafters.base import Drafter, Losses, TrainingState
from spectrain.features.batch import Batch
from spectrain.models.target import Target

from ..optimizers import OptimizerFactory, ParameterGroups


class ParallelStrategy(ABC):
    """A drafter in training, shared by the processes of a run."""

    name: str
    is_reusable = True  # after `restore_tensors` drafter and target can be used where they are
    unsharded = True  # every process holds all of the drafter while it trains, so that it can write too
    full_parameters = True  # as ordinary tensors, and torch's own optimiser with all of its state

    def __init__(self, accelerator: Accelerator, num_copies: int = 1, autocast: torch.dtype | None = None) -> None:
        self.accelerator, self.autocast = accelerator, autocast
        self.rank, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.num_copies = num_copies  # neighbouring processes that see the same data, for they run the target together
        self.data_rank, self.num_data_ranks = self.rank // num_copies, self.num_processes // num_copies
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process
        self.optimizer: torch.optim.Optimizer  # over what this process updates

    @abstractmethod
    def set_drafter(self, drafter: Drafter, target: Target) -> None:
        """Take a drafter with the same weights on every process."""

    @abstractmethod
    def start_stage(self, groups: ParameterGroups, clip: float, make_optimizer: OptimizerFactory) -> None:
        """Begin a stage with an optimizer of these parameter groups."""

    @abstractmethod
    def loss(self, batch: Batch, state: TrainingState, is_last: bool) -> Losses:
        """Return this process's losses of a batch, which may be the last of a step."""

    @abstractmethod
    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add to the gradients. After the last batch of a step they are averaged over processes."""

    @abstractmethod
    def step(self) -> bool:
        """Clip the gradients and step. Return False, and change nothing, where the gradients are not finite."""

    @abstractmethod
    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Gather parameters and buffers of a module on the CPU, for the main process. Every process must call this."""

    @abstractmethod
    def gather_optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Gather the optimizer's state on the CPU, numbered as in the groups. Every process must call this."""

    @abstractmethod
    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Undo `gather_optimizer_state`, on any number of processes."""

    def restore_tensors(self) -> None:
        """Restore full tensors on the main process after training, on the CPU if sharded. Every process calls this."""

    def all_reduce(self, *values: float) -> list[float]:
        """Sum each of these numbers over the processes that see different data."""
        if self.num_processes == 1:
            return list(values)
        totals = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device), "sum")
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
