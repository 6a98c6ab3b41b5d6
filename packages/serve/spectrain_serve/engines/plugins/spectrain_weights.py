"""Puts the weights of another drafter into a running vLLM, from a folder, on a GPU and on a CPU.

vLLM imports this module in its own environment, by --worker-extension-cls; spectrain need not be
installed there. vLLM's own backends for weights need CUDA. This one, named "spectrain", serves the
same endpoints: /start_draft_weight_update, /update_weights with {"update_info": {"path": FOLDER}},
and /finish_weight_update. All weights change in the second request, between two steps of the
engine, so that open requests go on.

A drafter whose output layer or embedding equals the target's when the server starts uses the
target's own module. Other values written there would change the target, so they are refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "spectrain"
Shapes = dict[str, tuple[int, ...]]


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up before an update."""


@dataclass
class DrafterFolder(WeightTransferUpdateInfo):
    """The folder of a drafter, as the server's machine sees it."""

    path: str


class FolderWeights(WeightTransferEngine[NoInitInfo, DrafterFolder]):
    """Reads the weights of a drafter from a folder in the layout that the server started with."""

    init_info_cls = NoInitInfo
    update_info_cls = DrafterFolder
    # Folder of the last drafter, and the shapes of the first one; None before an update.
    active_folder: str | None = None
    first_shapes: Shapes | None = None

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing: no process group is needed."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` makes the whole change."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: DrafterFolder) -> None:
        """Load a folder into the drafter; a ValueError says why it does not fit, and then
        nothing has changed.
        """
        if self.model is self._default_model:
            raise ValueError("only drafters are replaced; begin with /start_draft_weight_update")
        if self.first_shapes is None:
            self.first_shapes = list_shapes(read_tensors(self.model_config.model))
        tensors = read_tensors(update_info.path)
        check_shapes(list_shapes(tensors), self.first_shapes, update_info.path)
        tensors = drop_shared(tensors, self.model, self._default_model)
        with torch.inference_mode():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors.items())
            finalize_layerwise_reload(self.model, self.model_config)
        self.active_folder = update_info.path


def read_tensors(folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by name; raise a ValueError if it has none."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not tensors:
        raise ValueError(f"{folder}: there are no .safetensors in it")
    return tensors


def list_shapes(tensors: dict[str, torch.Tensor]) -> Shapes:
    """Return the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_shapes(shapes: Shapes, expected: Shapes, folder: str) -> None:
    """Raise a ValueError unless a folder has the tensors of the first drafter. vLLM would not
    notice a missing one.
    """
    if shapes != expected:
        names = sorted(
            name
            for name in shapes.keys() | expected.keys()
            if shapes.get(name) != expected.get(name)
        )
        raise ValueError(
            f"{folder}: its tensors are not those of the drafter that the server started with: "
            f"{names[:5]}"
        )


def drop_shared(
    tensors: dict[str, torch.Tensor], drafter: torch.nn.Module, target: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Return the tensors without those of modules that the drafter shares with the target; raise a
    ValueError if one of these has other values than the target's."""
    rest = dict(tensors)
    of_target = {*target.modules()}
    for name, module in drafter.named_modules():
        if module not in of_target:
            continue
        for key in {f"{name}.weight", f"{name.removeprefix('model.')}.weight"} & rest.keys():
            own: torch.Tensor = module.weight
            if own.shape != rest[key].shape or not torch.equal(own.cpu(), rest[key].to(own.dtype)):
                raise ValueError(
                    f"{key}: the drafter shares this module with the target since the server "
                    "started, so other values would change the target; start the server with a "
                    "drafter whose weights differ from the target's"
                )
            del rest[key]
    return rest


class DrafterWeights:
    """The worker extension that vLLM asks for."""

    weight_transfer_engine: Any
    vllm_config: Any

    def describe_drafter(self) -> dict[str, str]:
        """Return the folder of the active drafter; a RuntimeError says that the server takes no
        other one.
        """
        if not isinstance(self.weight_transfer_engine, FolderWeights):
            raise RuntimeError(
                f'the server was started without --weight-transfer-config \'{{"backend": '
                f'"{BACKEND}"}}\''
            )
        first = self.vllm_config.speculative_config.draft_model_config.model
        return {"path": self.weight_transfer_engine.active_folder or first}


# A worker imports this module before it makes its engine.
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FolderWeights)
