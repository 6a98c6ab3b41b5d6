"""Targets that several devices hold together: layers split by tensor parallelism, or sharded and
gathered while they run.

Either way all processes of a launch run the same layers at the same time. Every process holds the
complete embedding, final norm and output layer, because drafters borrow these.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

from spectrain.errors import RunError, UserError, first_line

from .model_parts import find_decoder, find_layers
from .pretrained import load_pretrained

Sharding = Literal["none", "fsdp2", "tensor"]


def select_auto_class(config: Any) -> Any:
    """Return the class that loads a configuration: a causal LM, or a model of text and images,
    whose text decoder is the target. Where both fit, the checkpoint's own class decides."""
    multimodal, text = (
        auto._model_mapping for auto in (AutoModelForImageTextToText, AutoModelForCausalLM)
    )
    if type(config) not in multimodal:
        return AutoModelForCausalLM
    is_saved_multimodal = multimodal[type(config)].__name__ in (config.architectures or ())
    return (
        AutoModelForImageTextToText
        if is_saved_multimodal or type(config) not in text
        else AutoModelForCausalLM
    )


def load_network(
    model: str, config: Any, device: str, sharding: Sharding, **options: Any
) -> nn.Module:
    """Load a causal LM by hub name or directory onto a device, complete or shared between the
    processes of the launch.
    """
    # Nothing is unpickled.
    options["use_safetensors"] = True
    if sharding == "none":
        network: nn.Module = load_pretrained(
            select_auto_class(config), model, "target.model", config=config, **options
        )
        return network if "device_map" in options or device == "cpu" else network.to(device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise UserError(
            f"target.sharding={sharding}: this launch has one process; start several with "
            "torchrun or accelerate launch"
        )
    share = _load_tensor_parallel if sharding == "tensor" else _load_fsdp2
    return share(model, config, device, options)


def _load_tensor_parallel(
    model: str, config: Any, device: str, options: dict[str, Any]
) -> nn.Module:
    """Load with tensor parallelism, by the plan of transformers for the model."""
    model_class: Any = select_auto_class(config)._model_mapping[type(config)]
    # The output layer is not split.
    headless: Any = type(model_class.__name__, (model_class,), {"_tp_plan": {}})
    count = dist.get_world_size()
    _check_heads(config.get_text_config(), count)
    try:
        plan = DistributedConfig(tp_size=count)
        network: nn.Module = load_pretrained(
            headless, model, "target.model", config=config, distributed_config=plan, **options
        )
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"target.sharding=tensor: transformers cannot cut this model {count} ways "
            f"({first_line(error)}); use fsdp2"
        ) from error
    head: Any = network.get_output_embeddings()  # type: ignore[operator]
    for name, parameter in list(head.named_parameters(recurse=False)):
        # It is split where it is tied to a split embedding.
        if hasattr(parameter, "full_tensor"):
            setattr(head, name, nn.Parameter(parameter.full_tensor(), requires_grad=False))
    _check_sharded(network)
    return network


def _check_heads(config: Any, count: int) -> None:
    """Raise UserError where the plan for a model would give a process part of a key-value head."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    is_cut = any(name.endswith("k_proj") and kind == "colwise" for name, kind in plan.items())
    heads = getattr(config, "num_key_value_heads", None)
    if is_cut and heads and heads % count:
        raise UserError(
            f"target.sharding=tensor: {count} processes cannot share the model's {heads} key-value "
            "heads equally; start as many as divide them, or use fsdp2"
        )


def _load_fsdp2(model: str, config: Any, device: str, options: dict[str, Any]) -> nn.Module:
    """Load with FSDP2 over the decoder layers. Only the first process reads the weights; it
    sends the others their shards.
    """
    first = dist.get_rank() == 0
    kind = select_auto_class(config)
    complete: Any = (
        load_pretrained(kind, model, "target.model", config=config, **options) if first else None
    )
    with torch.device("meta"):
        network: Any = kind.from_config(
            config, dtype=options["dtype"], attn_implementation=options["attn_implementation"]
        )
    network.tie_weights()
    mesh = dist.device_mesh.init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for layer in find_layers(find_decoder(network)) or ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    network.to_empty(device=device)
    # `to_empty` has separated tied weights.
    network.tie_weights()
    state = complete.state_dict() if first else {}
    set_model_state_dict(
        network, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    # No checkpoint holds buffers such as rotary frequencies.
    buffers = dict(complete.named_buffers()) if first else {}
    for name, buffer in network.named_buffers():
        if first:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)
    if first:
        network.generation_config = complete.generation_config
    settings = [network.generation_config]
    dist.broadcast_object_list(settings)
    network.generation_config = settings[0]
    _check_sharded(network)
    return network


def _check_sharded(network: Any) -> None:
    """Raise RunError where a process holds all of the layers after all."""
    parameters: list[Any] = [
        p for layer in find_layers(find_decoder(network)) or () for p in layer.parameters()
    ]
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters)
    total = sum(parameter.numel() for parameter in parameters)
    if local >= total:
        raise RunError(
            f"target: this process holds all {total} parameters of its layers, so nothing was "
            "shared"
        )
