"""Groups of processes that share the columns of their batches (`trainer.context_parallel`), beside
data parallelism.

Processes form a mesh, data x context: neighbours share a batch, and gradients are averaged over the
complete mesh.
"""

import torch.distributed as dist
from accelerate import Accelerator

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.features.base import Source
from spectrain.features.context_piece import ContextGroup, ContextMethod
from spectrain.models.target import Target


def check_context(
    size: int, drafter: Drafter, source: Source, target: Target, num_processes: int
) -> None:
    """Raise a UserError where groups of `size` processes cannot share the batches of this
    training.
    """
    setting = f"trainer.context_parallel={size}"
    if num_processes % size:
        raise UserError(
            f"{setting}: {num_processes} {'process' if num_processes == 1 else 'processes'} "
            f"cannot form groups of {size}; start a multiple of {size}, as in torchrun "
            f"--nproc-per-node {size}"
        )
    if size > 1 and drafter.capabilities.context_parallel is None:
        raise UserError(
            f"{setting}: the loss of this family reads other positions of a text than through its "
            "own attention, so processes cannot share a text; use eagle3, peagle, mtp, dflash, "
            "dflash2 or dspark, or leave it out"
        )
    if size > 1 and source.generates_text:
        raise UserError(
            f"{setting}: this source writes its texts while it trains; use source=live or "
            "source=store"
        )
    if size > 1 and target.sharding == "tensor" and size != num_processes:
        raise UserError(
            f"{setting}: with target.sharding=tensor all {num_processes} processes see the same "
            f"data; use {num_processes} or leave it out"
        )


def choose_method(method: str, size: int, num_heads: int) -> ContextMethod:
    """Return how attention reads other columns: auto exchanges heads where the processes can
    share them equally.
    """
    divides = num_heads % size == 0
    if method == "ulysses" and not divides:
        raise UserError(
            f"trainer.context_method=ulysses: {size} processes cannot share {num_heads} "
            "attention heads equally; use gather, or auto"
        )
    return "gather" if method == "gather" or not divides else "ulysses"


def make_context_group(accelerator: Accelerator, size: int, method: ContextMethod) -> ContextGroup:
    """Return the group of this process. Every process must call this."""
    shape = accelerator.num_processes // size, size
    mesh = dist.device_mesh.init_device_mesh(
        accelerator.device.type, shape, mesh_dim_names=("data", "context")
    )["context"]
    return ContextGroup(mesh.get_group(), mesh.get_local_rank(), size, method)
