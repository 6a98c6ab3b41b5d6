"""Errors of loading a target, turned into one sentence that names the model, the cause and the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

from spectrain.errors import UserError, first_line

from .architectures.quantized import Quantization, required_package


@contextmanager
def explain_load_failure(model: str) -> Iterator[None]:
    """Turn an error of loading into a UserError that names the model and the cause."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"target.model={model}: it could not be loaded ({first_line(error)}); check the name or the directory"
        ) from error


@contextmanager
def suggest_package(model: str, config: Any, quantization: Quantization | None) -> Iterator[None]:
    """Turn an error of loading quantized weights into a UserError that names the package to install."""
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
            f"target.model={model}: its quantized weights could not be loaded ({first_line(error)}); this needs pip install "
            f"{package}, and a machine that its kernels support"
        ) from error
