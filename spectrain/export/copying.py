"""Drafters that only copy, for vLLM: a package that vLLM imports, which needs nothing of this
project, with the store beside it.

The package is the folder `spectrain/copying` as it is, so the engine drafts by the code that our
own decoding drafts by.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import spectrain.copying
from spectrain.config.build import GroupSpec
from spectrain.copying.engine_drafter import SETTINGS_FILE, STORE_FOLDER, CopyingDrafter
from spectrain.data.datastore import Datastore
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.engines import ENGINES

from .drafter_files import write_json
from .targets import TargetFiles

PACKAGE = "spectrain_copying"
CLASS_PATH = f"{PACKAGE}.engine_drafter.{CopyingDrafter.__name__}"
ENGINE = "vllm"
METHOD = "custom_class"
NUM_TOKENS = 8
"""Tokens that a round drafts at most. A copy costs the engine nothing but their verification."""
TITLES = {"ngram": "n-grams of the text", "retrieval": "copies of the text"}
"""Choice of `drafter` -> what it copies, for the card."""


def refuse_other_drafters(drafter: GroupSpec, format_name: str | None) -> None:
    """Raise a UserError where a choice of `drafter` is no drafter that copies, or another format is
    named."""
    if drafter.choice not in TITLES:
        raise UserError(
            f"drafter={drafter.choice}: only {' and '.join(TITLES)} are exported without a run; "
            "name the run of another drafter, as in run=runs/NAME"
        )
    if format_name != ENGINE:
        raise UserError(
            f"format={format_name}: drafter={drafter.choice} has no weights, and only vLLM takes "
            "such a drafter from outside; use format=vllm"
        )


def write_copying(drafter: GroupSpec, target: TargetFiles, directory: Path) -> None:
    """Write the package of a drafter that copies into an existing folder; raise a UserError where
    its store is not of the target's tokenizer."""
    settings = drafter.with_defaults()
    package = directory / PACKAGE
    package.mkdir()
    for path in sorted(Path(spectrain.copying.__file__).parent.glob("*.py")):
        shutil.copyfile(path, package / path.name)
    write_json(
        package / SETTINGS_FILE,
        {
            "longest": settings["longest"],
            "matches": settings["matches"],
            "shortest": settings.get("shortest"),
            "enough": settings.get("enough", settings["matches"]),
        },
    )
    store = settings.get("store")
    if store is not None:
        stored = Datastore(store, target.tokenizer)
        (package / STORE_FOLDER).mkdir()
        for name in ("tokens", "suffixes"):
            np.save(package / STORE_FOLDER / f"{name}.npy", getattr(stored, name))


def render_copying_card(
    drafter: GroupSpec, target: TargetFiles, path: str, num_tokens: int = NUM_TOKENS
) -> str:
    """Return the text of README.md: what the folder holds, and vLLM's command."""
    settings: Mapping[str, Any] = drafter.with_defaults()
    store = " and of a store of texts" if settings.get("store") is not None else ""
    return "\n".join(
        [
            f"# Copying drafter for {target.name} in vLLM",
            "",
            f"It drafts {TITLES[str(drafter.choice)]}{store}, without weights. `{PACKAGE}/` needs "
            f"numpy alone, and vLLM ({versions()}) runs it in its own process. It drafts for "
            f"`{target.name}` only: a store holds token ids.",
            "",
            "## Serve",
            "",
            "```sh",
            copying_command(target, path, num_tokens),
            "```",
            "",
            "With the same tokens vLLM drafts what `spectrain eval "
            f"drafter={drafter.choice} tree=chain tree.depth={num_tokens}` drafts, round by round.",
            "",
        ]
    )


def copying_command(target: TargetFiles, path: str, num_tokens: int = NUM_TOKENS) -> str:
    """Return vLLM's command with the drafter in the folder `path`, which Python must find."""
    launch = EngineLaunch(target.engine_path, drafter=DrafterLaunch(METHOD, CLASS_PATH, num_tokens))
    return f"PYTHONPATH={path} {ENGINES[ENGINE].make_command(launch).format_shell()}"


def versions() -> str:
    """Return the versions of vLLM whose code this was written from."""
    from .engine_support import READ_VERSIONS

    return " and ".join(READ_VERSIONS[ENGINE])
