"""The Python environments that engines are installed in: read by their interpreter, without
importing the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spectrain.errors import UserError

PROBE = """
import importlib.metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"prefix": sys.prefix, "versions": versions}))
"""
PROBE_SECONDS = 60


@dataclass(frozen=True)
class EngineEnvironment:
    """The environment of an interpreter."""

    python: str
    # Its folder.
    prefix: Path
    # The installed versions of the packages in question.
    versions: Mapping[str, str]

    def require_engine(self, title: str, package: str) -> None:
        """Raise a UserError if none of the packages is installed; `package` is the one to
        install.
        """
        if not self.versions:
            raise UserError(
                f"server.python={self.python}: {title} is not installed there; install it in an "
                f"environment of its own (python -m venv ENV, ENV/bin/pip install {package}) and "
                "give server.python=ENV/bin/python"
            )


@cache
def read_environment(python: str | None, packages: tuple[str, ...]) -> EngineEnvironment:
    """Return the environment of an interpreter, or of this one if it is None, with the versions
    of the packages that it has.
    """
    program = sys.executable if python is None else str(Path(python).expanduser())
    try:
        done = subprocess.run(
            [program, "-c", PROBE, *packages],
            capture_output=True,
            text=True,
            check=True,
            timeout=PROBE_SECONDS,
        )
        content = json.loads(done.stdout.strip().splitlines()[-1])
        return EngineEnvironment(program, Path(content["prefix"]), content["versions"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"server.python={python}: it is no Python interpreter that runs; give the one of the "
            "engine's environment, as in server.python=ENV/bin/python"
        ) from error
