"""FSDP2: every process holds a shard of each of the drafter's tensors, by torch's `fully_shard`,
on any device.

What is gathered at one time is a block: a decoder layer, an attention or feed-forward part that is
the drafter's own, the projection of the fused features, or an output layer. The rest is gathered
for the whole pass over a batch: norms, and layers that a step runs once for each draft step. These
would be gathered anew for each, and their gradients summed in as many exchanges as this process's
texts have draft steps, which differ. With autocast, weights are gathered in its type and their
gradients are summed in float32.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from spectrain.drafters.base import Drafter, Losses
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target
from spectrain.models.weight_block import WeightBlock

from ..checkpoints import gather_tensor, unflatten_optimizer
from .base import ReplicatedStrategy

# FSDP2 finds the tensors in a registered dataclass.
torch.export.register_dataclass(Losses)


class FullyShardedStrategy(ReplicatedStrategy):
    """Every process holds a shard of each of the drafter's tensors, and all tensors of a block
    while the block runs (FSDP2).
    """

    name = "fsdp2"
    is_reusable = unsharded = full_parameters = False

    def set_drafter(self, drafter: Drafter, target: Target) -> None:
        super().set_drafter(drafter, target)
        mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.num_processes,))
        policy = MixedPrecisionPolicy(
            param_dtype=self.autocast,
            reduce_dtype=None if self.autocast is None else torch.float32,
            # Autocast converts the inputs that it has to.
            cast_forward_inputs=False,
        )
        # Outputs of a block are added to others, never changed in place.
        warnings.filterwarnings("ignore", ".*FSDP2-wrapped module .* returned a view tensor")
        blocks: list[Any] = []  # of FSDPModule
        for block in find_blocks(drafter):
            blocks.append(fully_shard(block, mesh=mesh, mp_policy=policy))
            for method in getattr(block, "weight_methods", ()):
                register_fsdp_forward_method(block, method)
        root: Any = fully_shard(drafter, mesh=mesh, mp_policy=policy)
        # While a module runs, the next one is gathered.
        for module, following in zip((root, *blocks), blocks):
            module.set_modules_to_forward_prefetch([following])
        parameters: list[Any] = list(drafter.parameters())
        if not parameters:
            raise UserError(
                "trainer.sharding=fsdp2: this family has no weights beside the target's, so "
                "nothing would be sharded; use zero2, zero3 or ddp"
            )
        total = sum(parameter.numel() for parameter in parameters)
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        num_local = sum(parameter.to_local().numel() for parameter in sharded)
        # A process may hold nothing of a few rows.
        if self.num_processes > 1 and (not sharded or num_local == total):
            raise RunError(
                f"trainer.sharding=fsdp2: this process holds {num_local} of {total} parameters, "
                "so nothing was sharded"
            )

    def _wrap_model(self) -> None:
        """Do nothing: the hooks that `set_drafter` installed average the gradients."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.drafter.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        torch.autograd.backward(loss)

    def _clip_gradients(self) -> Tensor:
        parts = [
            [p for p in self.trained_parameters if isinstance(p, DTensor) == sharded]
            for sharded in (True, False)
        ]
        norms = [_gradient_norm(part) for part in parts]
        norm = torch.stack([value for value in norms if value is not None]).norm()
        for part in parts:
            torch.nn.utils.clip_grads_with_norm_(part, self.clip, norm)
        return norm

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        named = module.state_dict(keep_vars=True)
        # Of tied tensors the first name.
        first = {id(tensor): name for name, tensor in reversed(named.items())}
        names = {*first.values()}
        state: dict[str, Any] = get_model_state_dict(
            module, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        return {name: tensor for name, tensor in state.items() if name in names}

    def load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        parameters = self.trained_parameters
        shared = {}
        for name, value in tensors.items():
            parameter = parameters[int(name.split(".", 1)[0])]
            fits = isinstance(parameter, DTensor) and value.shape == parameter.shape
            shared[name] = (
                distribute_tensor(
                    value.to(self.device), parameter.device_mesh, parameter.placements
                )
                if fits
                else value
            )
        unflatten_optimizer(self.optimizer, shared, numbers)

    def restore_tensors(self) -> None:
        # Tied parameters stay one object.
        restored: dict[int, nn.Parameter] = {}
        for module in self.drafter.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in restored:
                    # Every process sends its shard.
                    full = gather_tensor(parameter)
                    restored[id(parameter)] = nn.Parameter(full if self.is_main else torch.empty(0))
                setattr(module, name, restored[id(parameter)])


def find_blocks(drafter: nn.Module) -> list[nn.Module]:
    """Return the modules of a drafter that are sharded separately: the layers of each model inside
    it, and the outermost `WeightBlock`s outside of its repeated parts.

    A module that shares a parameter with another one is none: its weights are read there too.
    """
    uses = Counter(id(p) for _, p in drafter.named_parameters(remove_duplicate=False))
    blocks = []
    for module in _walk_blocks(drafter):
        own = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        if own and all(uses[key] == count for key, count in own.items()):
            blocks.append(module)
    return blocks


def _walk_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks below a module."""
    repeated = module.capabilities.repeated_parts if isinstance(module, Drafter) else ()
    for name, child in module.named_children():
        if name in repeated:
            continue
        if isinstance(child, Target):
            yield from child.layers
        elif isinstance(child, WeightBlock):
            yield child
        else:
            yield from _walk_blocks(child)


def _gradient_norm(parameters: list[Any]) -> Tensor | None:
    """Return the norm of the gradients over all processes; None without gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return None
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
