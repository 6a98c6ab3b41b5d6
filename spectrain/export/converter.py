"""From one layout to another: find out which one lies there, read it into our terms, write the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..provenance import versions
from ..training.checkpoints import written_whole
from .flat import Flat
from .huggingface import HuggingFace
from .layout import Files, Layout, Portable, write_json
from .medusa import MedusaOriginal, VllmMedusa
from .own import Own
from .peft import Peft
from .speculators import Speculators
from .targets import TargetFiles

LAYOUTS: tuple[Layout, ...] = (Own(), Peft(), Speculators(), VllmMedusa(), MedusaOriginal(), Flat(), HuggingFace())
FORMATS: dict[str, tuple[Layout, ...]] = {
    "vllm": (Speculators(), VllmMedusa(), HuggingFace()),
    "sglang": (Flat(), HuggingFace()),
    "hf": (HuggingFace(),),
    "medusa": (MedusaOriginal(),),
    "peft": (Peft(),),
    "spectrain": (Own(),),
}
ALONE = "score it with spectrain eval, which needs no engine"
NOWHERE = {
    "Hydra": f"no engine drafts with heads that read each other's tokens; {ALONE}, or train recipe=medusa1",
    "Kangaroo": f"no engine drafts with an adapter behind an early exit; {ALONE}, or train recipe=eagle3",
    "LayerSkip": f"no engine leaves layers of the target out; {ALONE}",
    "Lookahead": f"it has no weights, and no engine has its pool of n-grams; {ALONE}",
    "Ngram": 'it has no weights; vLLM has its own, --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
}
SAID_BY_LAYOUT = ("_target_", "architecture", "layers", "vocab_size", "num_layers", "model")


def detect(files: Files) -> Layout:
    """The layout of a directory."""
    for layout in LAYOUTS:
        if layout.recognises(files):
            return layout
    titles = ", ".join(dict.fromkeys(layout.title for layout in LAYOUTS))
    raise UserError(f"{files.directory}: its config.json is of no known layout; known are {titles}")


def layout_for(family: str, form: str) -> Layout:
    """The layout that a format stands for with a family's drafters, or one sentence on what can be done instead."""
    if form not in FORMATS:
        from ..config import nearest

        raise UserError(f"format={form}: there is no such format; {nearest(form, FORMATS)}")
    for layout in FORMATS[form]:
        if family in layout.families:
            return layout
    name = family.lower()
    if family in NOWHERE:
        raise UserError(f"format={form}: {name} cannot be served: {NOWHERE[family]}")
    fitting = [key for key, layouts in FORMATS.items() if any(family in layout.families for layout in layouts)]
    raise UserError(f"format={form}: it does not hold a drafter of class {name}; use {' or '.join(fitting)}")


def read_drafter(directory: Path, target: TargetFiles | None = None) -> Portable:
    """A drafter in any known layout; stops at the first thing that is surely wrong with its files."""
    from .linter import check

    files = Files.read(directory)
    layout = detect(files)
    for finding in check(files, layout, None):
        if finding.level == "error" and not (finding.name == "missing-embed-tokens"):
            raise UserError(f"{directory}: {finding.what} ({finding.name}); {finding.mend}")
    try:
        return layout.read(files, target)
    except KeyError as error:
        raise UserError(f"{directory}: {error} is missing; run spectrain lint {directory}") from error


def write_drafter(drafter: Portable, layout: Layout, target: TargetFiles | None, directory: Path) -> None:
    """Lay a drafter down in a folder, with spectrain.json beside it for what the layout has no words for."""
    layout.write(drafter, target, directory)
    if isinstance(layout, Own):
        return
    kept: dict[str, Any] = {
        "drafter": {key: value for key, value in drafter.drafter.items() if key not in SAID_BY_LAYOUT},
        "description": {k: drafter.description[k] for k in ("tree", "acceptance", "recipe") if drafter.description.get(k)},
        "spectrain_version": versions().get("spectrain"),
    }
    if "mask_row" in drafter.description:
        kept["mask_row"] = drafter.description["mask_row"]
    if target is not None:
        kept["target"] = {"said": target.said, "name": target.name, "tokenizer": target.template_hash()}
    if drafter.family == "EarlyExit":
        kept["exits"] = trained_exits(drafter)
    write_json(directory / "spectrain.json", kept)


def trained_exits(drafter: Portable) -> dict[str, Any]:
    """The early exits that a target was trained for, as transformers counts them: layers that are run."""
    from transformers import AutoConfig

    assert drafter.trained_target is not None
    count = AutoConfig.from_pretrained(drafter.trained_target).get_text_config().num_hidden_layers
    return {"trained": list(range(1, count)), "default": drafter.drafter.get("exit_layer")}


def convert(source: Path, out: Path, form: str, target: TargetFiles | None) -> Path:
    """Read a drafter and write it in another layout, the same numbers bit by bit."""
    drafter = read_drafter(source, target)
    if target is None and drafter.target is not None:
        target = TargetFiles(drafter.target)
    layout = layout_for(drafter.family, form)
    refuse_full(out)
    with written_whole(out) as scratch:
        write_drafter(drafter, layout, target, scratch)
    return out


def refuse_full(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: something is there already; choose another folder")
