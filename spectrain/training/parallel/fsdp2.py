"""A part of each of the drafter's tensors on every process (FSDP2), by torch's `fully_shard` on any device."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from spectrain.drafters.base import Drafter, Losses
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target

from ..checkpoints import gather_tensor, unflatten_optimizer
from .base import ReplicatedStrategy

torch.export.register_dataclass(Losses)  # so that FSDP2 finds the tensors in it


class FullyShardedStrategy(ReplicatedStrategy):
    """Every process has a part of each of the drafter's tensors, and the whole of a block while it runs (FSDP2)."""

    name = "fsdp2"
    is_reusable = unsharded = full_parameters = False

    def set_drafter(self, drafter: Drafter, target: Target) -> None:
        super().set_drafter(drafter, target)
        mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.num_processes,))
        for block in find_blocks(drafter):
            fully_shard(block, mesh=mesh)
        fully_shard(drafter, mesh=mesh)
        parameters: list[Any] = list(drafter.parameters())
        if not parameters:
            raise UserError(
                "trainer.sharding=fsdp2: this family has no weights beside the target's, so nothing would be sharded; use "
                "zero2, zero3 or ddp"
            )
        total = sum(parameter.numel() for parameter in parameters)
        held = sum(parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor))
        if self.num_processes > 1 and not 0 < held < total:
            raise RunError(f"trainer.sharding=fsdp2: this process holds {held} of {total} parameters, so nothing was sharded")

    def _wrap_model(self) -> None:
        """The hooks that `set_drafter` put in do the work."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.drafter.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        torch.autograd.backward(loss)

    def _clip_gradients(self) -> Tensor:
        parts = [[p for p in self.trained_parameters if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
        norms = [_gradient_norm(part) for part in parts]
        norm = torch.stack([value for value in norms if value is not None]).norm()
        for part in parts:
            torch.nn.utils.clip_grads_with_norm_(part, self.clip, norm)
        return norm

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        named = module.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(named.items())}  # of tied ones
        names = {*first.values()}
        state: dict[str, Any] = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return {name: tensor for name, tensor in state.items() if name in names}

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        parameters, shared = self.trained_parameters, {}
        for name, value in tensors.items():
            parameter = parameters[int(name.split(".", 1)[0])]
            fits = isinstance(parameter, DTensor) and value.shape == parameter.shape
            shared[name] = (
                distribute_tensor(value.to(self.device), parameter.device_mesh, parameter.placements) if fits else value
            )
        unflatten_optimizer(self.optimizer, shared, numbers)

    def restore_tensors(self) -> None:
        done: dict[int, nn.Parameter] = {}  # of tied ones the same again
        for module in self.drafter.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in done:
                    full = gather_tensor(parameter)  # on every process, for all of them send
                    done[id(parameter)] = nn.Parameter(full if self.is_main else torch.empty(0))
                setattr(module, name, done[id(parameter)])


def find_blocks(drafter: nn.Module) -> list[nn.Module]:
    """The parts of a drafter that are sharded by themselves: the layers of a model inside it, each of which runs as a whole."""
    return [layer for module in drafter.modules() if isinstance(module, Target) for layer in module.layers]


def _gradient_norm(parameters: list[Any]) -> Tensor | None:
    """The norm of the gradients, over all processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return None
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
