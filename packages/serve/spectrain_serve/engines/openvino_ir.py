"""The conversion of a model in transformers format to OpenVINO's intermediate representation (IR),
by optimum-intel, which needs an environment of its own (`make openvino`)."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spectrain.errors import RunError, UserError

from .environments import EngineEnvironment, read_environment

PYTHON = ".venv-openvino/bin/python"
"""Interpreter of the environment that `make openvino` installs, below the project's folder."""
PACKAGES = ("openvino-genai", "optimum-intel")
WEIGHT_FORMATS = {"float32": "fp32", "float16": "fp16", "int8": "int8", "int4": "int4"}
"""Weight types -> optimum-intel's names."""
IR_NAME = "openvino_model"


def read_openvino_environment(python: str | None, key: str) -> EngineEnvironment:
    """Return the environment of OpenVINO's interpreter, by default that of `make openvino`.

    A UserError names the setting `key` if there is none, or it lacks OpenVINO GenAI or
    optimum-intel.
    """
    program = Path(python or PYTHON).expanduser().absolute()
    environment = read_environment(str(program), PACKAGES) if program.exists() else None
    if environment is None or len(environment.versions) < len(PACKAGES):
        raise UserError(
            f"{key}={program}: OpenVINO GenAI and optimum-intel are not installed there; run make "
            "openvino in the project's folder, or give the interpreter of an environment that "
            "has them"
        )
    return environment


@dataclass(frozen=True)
class IrConverter:
    """How models are converted."""

    # Interpreter of an environment with optimum-intel; None takes the one of `make openvino`.
    python: str | None = None
    # Type of the weights.
    dtype: str = "float32"
    # Setting that names the interpreter.
    key: str = "engine_python"

    def __post_init__(self) -> None:
        if self.dtype not in WEIGHT_FORMATS:
            raise UserError(
                f"dtype={self.dtype}: OpenVINO's files have {', '.join(WEIGHT_FORMATS)} weights; "
                "use one of them"
            )

    def convert(self, source: Path | str, out: Path, options: tuple[str, ...] = ()) -> None:
        """Write the IR of a model, a folder or a name on the hub, into the folder `out`."""
        environment = read_openvino_environment(self.python, self.key)
        command = [
            environment.python,
            "-I",
            "-m",
            "optimum.commands.optimum_cli",
            "export",
            "openvino",
        ]
        command += ["--model", str(source), "--task", "text-generation-with-past"]
        command += ["--weight-format", WEIGHT_FORMATS[self.dtype], *options, str(out)]
        variables = (
            {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if Path(source).is_dir() else {}
        )
        ended = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        if ended.returncode or not (out / f"{IR_NAME}.xml").exists():
            reason = next(
                iter(reversed((ended.stderr or ended.stdout).strip().splitlines())), "no output"
            )
            raise RunError(
                f"{source}: optimum-intel could not convert it to OpenVINO's format ({reason})"
            )
