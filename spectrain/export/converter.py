"""From one layout to another: read a drafter into our terms, write it in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from spectrain.errors import UserError, first_line
from spectrain.files import written
from spectrain.provenance import versions
from spectrain.settings.choices import named

from .layout import KEPT, MALFORMED, Files, Layout, Portable, write_json
from .layouts import detect, layout_for
from .linter import NOT_DATA, check
from .targets import TargetFiles

SAID_BY_LAYOUT = (
    "_target_", "architecture", "layers", "vocab_size", "num_layers", "model", "block_size", "sample_from_anchor", "causal",
    "window", "mask_token_id", "own_embedding",
)  # fmt: skip
MENDED = (
    "missing-embed-tokens",
    "d2t-of-all",
    "short-heads",
    "block-causality",
    "ignored-head",
)  # faults that reading and writing again mends


def read_drafter(directory: Path, target: TargetFiles | None = None) -> Portable:
    """A drafter in any known layout; stops at the first thing that is surely wrong with its files."""
    files = Files.read(directory)
    layout = detect(files)
    for finding in check(files, layout, None):
        if finding.name == NOT_DATA:
            raise UserError(f"{finding.what}; {finding.mend}")
        if finding.level == "error" and finding.name not in MENDED:
            raise UserError(f"{directory}: {finding.what} ({finding.name}); {finding.mend}")
    try:
        return layout.read(files, target)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{directory}: {error} is missing; run spectrain lint {directory}") from error
    except MALFORMED as error:
        raise UserError(f"{directory}: its files are of no drafter ({first_line(error)}); copy them again") from error


def write_drafter(drafter: Portable, layout: Layout, target: TargetFiles | None, directory: Path) -> None:
    """Lay a drafter down in a folder, with spectrain.json beside it for what the layout has no words for."""
    if not layout.says_all:
        drafter = drafter.plain_heads()
    layout.write(drafter, target, directory)
    if layout.says_all:
        return
    kept: dict[str, Any] = {
        "drafter": {key: value for key, value in drafter.drafter.items() if key not in (*SAID_BY_LAYOUT, *layout.says)},
        "description": named({k: drafter.description[k] for k in KEPT if drafter.description.get(k)}),
        "spectrain_version": versions().get("spectrain"),
    }
    if "mask_row" in drafter.description:
        kept["mask_row"] = drafter.description["mask_row"]
    if target is not None:
        kept["target"] = {"said": target.said, "name": target.name, "tokenizer": target.template_hash()}
    if drafter.is_target:
        kept["exits"] = trained_exits(drafter)
    write_json(directory / "spectrain.json", kept)


def trained_exits(drafter: Portable) -> dict[str, Any]:
    """The early exits that a target was trained for, as transformers counts them: layers that are run."""
    assert drafter.trained_target is not None
    count = AutoConfig.from_pretrained(drafter.trained_target, trust_remote_code=False).get_text_config().num_hidden_layers
    return {"trained": list(range(1, count)), "default": drafter.drafter.get("exit_layer")}


def convert(source: Path, out: Path, form: str, target: TargetFiles | None) -> Path:
    """Read a drafter and write it in another layout, the same numbers bit by bit; heads of low rank are multiplied out."""
    drafter = read_drafter(source, target)
    if target is None and drafter.target is not None:
        target = TargetFiles(drafter.target)
    layout = layout_for(drafter.family, form)
    refuse_full(out)
    with written(out, folder=True) as scratch:
        write_drafter(drafter, layout, target, scratch)
    return out


def refuse_full(out: Path) -> None:
    if out.is_symlink():
        raise UserError(f"{out}: this is a link, and it would be replaced; give the folder that it leads to, or another")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: something is there already; choose another folder")
