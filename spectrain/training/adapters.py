"""Low-rank adapters in a drafter whose training continues (`adapter=lora`), through peft.

Medusa-2 and LayerSkip adapt their target instead (spectrain/models/lora.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from spectrain.config.values import Count, Positive
from spectrain.drafters.base import Drafter, Stage
from spectrain.errors import UserError, suggest_nearest
from spectrain.models.lora import find_lora_layers, merge_lora


@dataclass(frozen=True)
class LoraAdapter:
    """LoRA (Hu et al., 2022): a linear layer learns alpha / rank B A x beside its frozen weight;
    merged, the drafter has the tensors that it had before.

    Everything else stays frozen. Output layers take no adapter: losses multiply with their weights
    without calling them.
    """

    # Rank of the update of each weight; a layer with a side that is not longer takes no adapter.
    rank: Count = 8
    # Scale of the updates, which are multiplied by alpha / rank.
    alpha: Positive = 16.0
    # Names of the linear layers that learn, as in [q_proj,o_proj]; null takes all that the family
    # trains but output layers.
    modules: list[str] | None = None

    def adapt_drafter(self, drafter: Drafter, vocab_size: int) -> None:
        """Add adapters, which change nothing at first, to a drafter for a target with this
        vocabulary; freeze its weights.
        """
        if drafter.capabilities.target_training is not None:
            raise UserError(
                "adapter=lora: this family trains its target, which has no adapter here; leave "
                "adapter out"
            )
        if any(name.rpartition(".")[2] == "lora_A" for name, _ in drafter.named_modules()):
            raise UserError(
                "adapter=lora: the weights of this family are low-rank adapters already; leave "
                "adapter out"
            )
        linears = find_trained_linears(drafter, self.rank, vocab_size)
        if not linears:
            raise UserError(
                "adapter=lora: this family trains no linear layer wider than "
                f"adapter.rank={self.rank}, other than output layers; leave adapter out"
            )
        names = [
            name
            for name in linears
            if self.modules is None or name.rpartition(".")[2] in self.modules
        ]
        known = sorted({name.rpartition(".")[2] for name in linears})
        for module in self.modules or ():
            if module not in known:
                raise UserError(
                    f"adapter.modules: {module} takes no adapter here; "
                    f"{suggest_nearest(module, known)}"
                )
        # A pattern, because peft would also take names that only end alike.
        pattern = "|".join(map(re.escape, names))
        inject_adapter_in_model(
            LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=pattern), drafter
        )
        for layer in find_lora_layers(drafter):
            for factors in (layer.lora_A, layer.lora_B):
                # bfloat16 would lose small steps.
                factors.float()


def find_trained_linears(drafter: Drafter, rank: int, vocab_size: int) -> Mapping[str, nn.Linear]:
    """Return by name the linear layers that a drafter trains and that an update of a rank fits:
    those with longer sides that are no output layer of its vocabulary or of the target's.

    torch's MultiheadAttention reads the weight of its output layer without calling the layer, so an
    update beside it would do nothing: it is left as it is.
    """
    trained = {
        id(parameter)
        for stage in drafter.stages
        for group in stage.groups
        for parameter in group["params"]
    }
    vocabularies = {vocab_size, getattr(drafter, "vocab_size", None)}
    uncalled = {
        id(module.out_proj)
        for module in drafter.modules()
        if isinstance(module, nn.MultiheadAttention)
    }

    def is_output(name: str, linear: nn.Linear) -> bool:
        return name.rpartition(".")[2] == "lm_head" or linear.out_features in vocabularies

    return {
        name: module
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in trained
        if id(module) not in uncalled
        if min(module.weight.shape) > rank and not is_output(name, module)
    }


def list_adapter_parameters(drafter: Drafter) -> list[nn.Parameter]:
    """Return the factors of all adapters of a drafter."""
    layers = find_lora_layers(drafter)
    return [
        parameter
        for layer in layers
        for part in (layer.lora_A, layer.lora_B)
        for parameter in part.parameters()
    ]


def describe_adapters(drafter: Drafter) -> str:
    """Return the line that a training prints about the adapters of its drafter."""
    learning = sum(parameter.numel() for parameter in list_adapter_parameters(drafter))
    total = sum(parameter.numel() for parameter in drafter.parameters()) - learning
    count = len(find_lora_layers(drafter))
    return (
        f"adapters in {count} layers: {learning:,} parameters learn, and are merged into the "
        f"drafter's {total:,} at the end"
    )


def select_stage_groups(drafter: Drafter, stage: Stage) -> list[dict[str, Any]]:
    """Return the parameter groups of a stage; of a drafter with adapters only these."""
    adapters = {id(parameter) for parameter in list_adapter_parameters(drafter)}
    if not adapters:
        return stage.groups
    groups = [
        {**group, "params": [p for p in group["params"] if id(p) in adapters]}
        for group in stage.groups
    ]
    return [group for group in groups if group["params"]]


def merge_adapters(drafter: Drafter) -> None:
    """Merge the adapters of a drafter into its weights, which can then be trained again."""
    for layer in find_lora_layers(drafter):
        layer.get_base_layer().requires_grad_(True)
    merge_lora(drafter)
