"""Errors of loading a target, turned into one sentence that names the model, the cause and the
remedy.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import OfflineModeIsEnabled

from spectrain.errors import RunError, UserError, describe_error, first_line, is_network_error

from .architectures.quantized import Quantization, required_package
from .published import MODELS
from .rope import FORMS, RopeError, read_rope

HUB_SECONDS = 10.0
"""Seconds within which the hub must answer."""


def check_hub(model: str) -> None:
    """Raise UserError for a name whose files are not on this machine where the hub cannot be
    reached; the libraries would ask for half a minute first. Other faults are left to them.
    """
    try:
        if try_to_load_from_cache(model, "config.json") is None:
            HfApi().model_info(model, timeout=HUB_SECONDS)
    except OfflineModeIsEnabled:
        return
    except Exception as error:
        if not is_network_error(error):
            return
        near = get_close_matches(model.lower(), ("tiny", "smollm2", *MODELS), n=1, cutoff=0.75)
        advice = (
            f"write {near[0]} for the target of this name"
            if near
            else "give a model directory, or a name that was downloaded before"
        )
        raise UserError(
            f"target.model={model}: there is no such directory, and the hub cannot be reached "
            f"({first_line(error)}); {advice}"
        ) from error


@contextmanager
def explain_load_failure(model: str, key: str = "target.model") -> Iterator[None]:
    """Turn an error of loading into a UserError that names the model by a key, and the cause."""
    try:
        yield
    except (UserError, RunError):
        raise
    # The settings of a foreign config.json may raise anything.
    except Exception as error:
        reason = explain_load_error(model, error)
        raise UserError(
            f"{key}={model}: it could not be loaded ({reason}); check the name or the directory"
        ) from error


def explain_load_error(model: str | Path, error: Exception) -> str:
    """Describe the cause of an error of loading: an adapter, a rotary embedding that cannot be
    read, or the error.
    """
    if (adapter := describe_adapter(Path(model).expanduser())) is not None:
        return adapter
    path = Path(model).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        for group in (config, config.get("text_config")):
            if isinstance(group, dict):
                read_rope(group)
    except RopeError as fault:
        return f"config.json: {fault}"
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    # Classes of transformers look their rotary embedding up in a table.
    if isinstance(error, KeyError) and error.args[0] in (*FORMS, "mrope"):
        return f"the model's class has no rotary embedding of rope_type={error.args[0]}"
    is_described = isinstance(error, (OSError, ValueError, ImportError, RuntimeError))
    return first_line(error) if is_described else describe_error(error)


def describe_adapter(directory: Path) -> str | None:
    """Describe a directory that holds a LoRA adapter and no model, with the remedy; return None
    for any other.
    """
    path = directory / "adapter_config.json"
    if not path.is_file() or (directory / "config.json").exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    base = name if isinstance(name, str) and name else "a model that it does not name"
    return (
        f"it holds a LoRA adapter for {base} and no model; merge it, as with peft's "
        "merge_and_unload and save_pretrained, and give the merged model's directory as "
        "target.model"
    )


@contextmanager
def suggest_package(model: str, config: Any, quantization: Quantization | None) -> Iterator[None]:
    """Turn an error of loading quantized weights into a UserError that names the package to
    install.
    """
    package = required_package(config, quantization)
    try:
        yield
    except UserError:
        raise
    # Quantizers raise errors of any kind.
    except Exception as error:
        if package is None:
            raise
        raise UserError(
            f"target.model={model}: its quantized weights could not be loaded "
            f"({first_line(error)}); this needs pip install {package}, and a machine that its "
            "kernels support"
        ) from error
