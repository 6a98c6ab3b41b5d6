"""LoRA at selected tokens, which leaves all other tokens unchanged. Shapes: B batch, N tokens, D
width, R rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from spectrain.errors import UserError
from spectrain.models.target import Target


class LoraFactors(nn.Module):
    """The factors A and B of a LoRA update alpha / rank B A x, which is zero at first (Hu et
    al., 2022).
    """

    def __init__(self, linear: Any, rank: int) -> None:
        super().__init__()
        into, out = (
            (linear.in_features, linear.out_features)
            if isinstance(linear, nn.Linear)
            else (linear.nx, linear.nf)
        )
        self.lora_A = nn.Linear(into, rank, bias=False)
        self.lora_B = nn.Linear(rank, out, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.stored_values = into + out  # per row: the selected input and the update

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))


def find_linears(target: Target, first: int = 0) -> dict[str, nn.Module]:
    """Return every linear of the decoder layers from `first` on, GPT-2's Conv1D included, by its
    name in the model.

    Raises `UserError` if there is none.
    """
    layers = [*target.layers][first:]
    linear_ids = {
        id(module)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    linears = {
        name: module for name, module in target.model.named_modules() if id(module) in linear_ids
    }
    if not linears:
        raise UserError(
            f"drafter.rank: the layers of {target.name} have no linear that LoRA could act on; "
            "use drafter.rank=0"
        )
    return linears


@contextmanager
def add_lora_at(
    target: Target, factors: dict[str, nn.Module], scale: float, rows: Tensor, count: int
) -> Iterator[None]:
    """Add scale B A x to the outputs of these linears at `rows` [R] of all `count` = B N tokens,
    inside the context.
    """

    def make_hook(name: str, part: nn.Module) -> Any:
        def add_update(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Tensor:
            flat = args[0].flatten(0, -2)
            if not isinstance(output, Tensor) or len(flat) != count:
                raise UserError(
                    f"drafter: {name} of {target.name} does not run token by token; use another "
                    "family"
                )
            update = scale * part(flat.index_select(0, rows))
            return output.flatten(0, -2).index_add(0, rows, update.to(output.dtype)).view_as(output)

        return add_update

    with ExitStack() as stack:
        for name, part in factors.items():
            stack.callback(
                target.model.get_submodule(name).register_forward_hook(make_hook(name, part)).remove
            )
        yield


# Files in peft's format


def peft_layout(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Map the factors of linears of these names to peft's file and its tensor names."""
    return {
        f"factors.{number}.{factor}.weight": (
            "adapter_model.safetensors",
            f"base_model.model.{name}.{factor}.weight",
        )
        for number, name in enumerate(names)
        for factor in ("lora_A", "lora_B")
    }


def peft_config(names: Sequence[str], rank: int, alpha: float, path: str, first: int = 0) -> str:
    """Return peft's adapter_config.json for linears of the layers from `first` on.

    The format cannot express the gate: an engine that applies the adapter at every token runs a
    different model.
    """
    modules = sorted({name.rpartition(".")[2] for name in names})
    layers = (
        sorted({int(part) for name in names for part in name.split(".") if part.isdigit()})
        if first
        else None
    )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=modules,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=path,
        layers_to_transform=layers,
    )
    content = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
