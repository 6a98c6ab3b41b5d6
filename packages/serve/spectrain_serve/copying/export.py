"""Drafters that only copy, for vLLM: a package that vLLM imports, which needs nothing of this
project, with the store beside it.

The package is the folder `spectrain/copying`, and `engine_drafter.py` beside it, so the engine
drafts by the code that our own decoding drafts by.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import spectrain.copying
from spectrain.config.build import GroupSpec
from spectrain.data.datastore import Datastore
from spectrain.export.drafter_files import write_json
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.engines import ENGINES

from . import engine_drafter
from .engine_drafter import SETTINGS_FILE, STORE_FOLDER, CopyingDrafter

PACKAGE = "spectrain_copying"
CLASS_PATH = f"{PACKAGE}.engine_drafter.{CopyingDrafter.__name__}"
ENGINE = "vllm"
METHOD = "custom_class"
NUM_TOKENS = 8
"""Tokens that a round drafts at most. A copy costs the engine nothing but their verification."""
TITLES = {"ngram": "n-grams of the text", "retrieval": "copies of the text"}
"""Choice of `drafter` -> what it copies, for the card."""


def write_copying(drafter: GroupSpec, target: TargetFiles, directory: Path, path: str) -> None:
    """Write the package of a drafter that copies, and a card with the folder's name `path`, into an
    existing folder; raise a UserError where its store is not of the target's tokenizer."""
    (directory / "README.md").write_text(render_card(drafter, target, path))
    settings = drafter.with_defaults()
    package = directory / PACKAGE
    package.mkdir()
    for module in sorted(Path(spectrain.copying.__file__).parent.glob("*.py")):
        shutil.copyfile(module, package / module.name)
    drafting = Path(engine_drafter.__file__)
    # In the package, the folder's modules stand beside it.
    text = drafting.read_text().replace("from spectrain.copying.", "from .")
    (package / drafting.name).write_text(text)
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


def render_card(drafter: GroupSpec, target: TargetFiles, path: str) -> str:
    """Return the text of README.md: what the folder holds, and vLLM's command."""
    has_store = drafter.with_defaults().get("store") is not None
    store = " and of a store of texts" if has_store else ""
    versions = " and ".join(ENGINES[ENGINE].read_versions)
    launch = EngineLaunch(target.engine_path, drafter=DrafterLaunch(METHOD, CLASS_PATH, NUM_TOKENS))
    command = ENGINES[ENGINE].make_command(launch).format_shell()
    return "\n".join(
        [
            f"# Copying drafter for {target.name} in vLLM",
            "",
            f"It drafts {TITLES[str(drafter.choice)]}{store}, without weights. `{PACKAGE}/` needs "
            f"numpy alone, and vLLM ({versions}) runs it in its own process. It drafts for "
            f"`{target.name}` only: a store holds token ids.",
            "",
            "## Serve",
            "",
            "```sh",
            # Python must find the package.
            f"PYTHONPATH={path} {command}",
            "```",
            "",
            "With the same tokens vLLM drafts what `spectrain eval "
            f"drafter={drafter.choice} tree=chain tree.depth={NUM_TOKENS}` drafts, round by round.",
            "",
        ]
    )
