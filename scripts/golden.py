"""What must stay the same when code moves: weights, scores and exports of every recipe and family
on the tiny target.

    python -m scripts.golden record DIR      # writes DIR/golden.json
    python -m scripts.golden compare DIR     # measures again and lists every difference; exit
    status 1 if there is one

Floats differ between processors, so no test compares these numbers. Record before a change, and
compare after it.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, open_dict
from safetensors import safe_open

from spectrain.cli.export import export_command
from spectrain.config.build import build, register_resolvers
from spectrain.config.choices import choice_files, conf_folders, list_constructors
from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain.export.layouts import EXPORT_FORMATS, SERVING_HINTS
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import save_drafter
from spectrain.runs.score import evaluate
from spectrain.runs.train import train_and_score

ROOT = Path(__file__).parents[1]
TRAINING = [
    "target=tiny",
    "trainer.max_steps=6",
    "data.limit=10",
    "data.max_length=128",
    "trainer.batch_tokens=256",
    "eval=none",
]
SCORED_RECIPES = ("eagle3", "medusa1", "dflash", "peagle", "gkd", "hydra", "kangaroo", "gated_lora")
SCORED_CHOICES = ("ngram", "lookahead")
SCORING = [
    "target=tiny",
    "eval.limit=2",
    "eval.max_new_tokens=24",
    "eval.baselines=[chain,ngram,lookahead,fixed]",
]
# Parts of a summary that time, memory, the machine or the moment decides.
UNSTABLE_KEYS = re.compile(
    "second|speed|time|noise|memory|bytes|date|commit|version|thread|machine|hardware|device|price"
    "|cost|predicted|traffic|load|recommended|bound|latency|command|path|provenance|jitter|energy"
    "|joule|^c$|best_gamma|headline"
)
DFLASH = {"block_size": 5, "num_layers": 2}
SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"vocab_size": 256},
    "peagle": {"vocab_size": 256, "num_layers": 1},
    "medusa": {"vocab_size": 2048, "num_layers": 1},
    "dflash": DFLASH,
    "dflash2": {**DFLASH, "selector_rank": 8, "selector_top_k": 8},
    "dspark": {**DFLASH, "rank": 8, "markov_head": "vanilla"},
    "causal": {"num_layers": 1},
    "redrafter": {"vocab_size": 2048, "num_blocks": 1, "cell": "linear"},
    "domino": {**DFLASH, "gru_width": 12, "rank": 8},
    "xpress": {**DFLASH, "rank": 8, "num_passes": 2},
    "lilicorr": {
        **DFLASH,
        "top_k": 4,
        "correction_layers": 1,
        "correction_heads": 2,
        "factor_width": 12,
    },
    "gated_lora": {"num_masks": 2, "rank": 4},
    "uno": {"num_masks": 3, "rank": 4},
}


def compose_words(command: str, words: list[str]) -> DictConfig:
    """Compose a command's configuration of these words."""
    groups = {*list_groups()}
    overrides = [word if word.partition("=")[0] in groups else f"++{word}" for word in words]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        return compose(command, overrides=overrides)


def list_groups() -> Iterator[str]:
    """Yield the names of all groups of configurations."""
    for folder in conf_folders():
        yield from (entry.name for entry in folder.iterdir() if entry.is_dir())


def hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def hash_tensors(path: Path) -> dict[str, str]:
    """Return tensor name -> type, shape and hash of its bytes."""
    hashes = {}
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            content = (
                tensor.view(torch.uint8).numpy().tobytes()
                if tensor.dim()
                else str(tensor.item()).encode()
            )
            hashes[name] = f"{tensor.dtype} {list(tensor.shape)} {hash_bytes(content)}"
    return hashes


def attempt(measure: Callable[[], Any], scratch: Path) -> Any:
    """Return what was measured, or the error as text; both without the paths of the folders."""
    try:
        with redirect_stdout(StringIO()):
            measured = measure()
    except (UserError, RunError) as error:
        measured = {"error": str(error)}
    except Exception as error:
        measured = {"exception": f"{type(error).__name__}: {error}"[:300]}
    return json.loads(json.dumps(measured).replace(str(scratch), "DIR").replace(str(ROOT), "ROOT"))


def train_recipe(recipe: str, folder: Path, target: Target) -> dict[str, Any]:
    """Train a recipe for six steps and return the hashes of the weights, and the losses."""
    torch.manual_seed(0)
    spec = RunSpec.from_config(
        compose_words("train", [f"recipe={recipe}", *TRAINING, f"run={folder}"])
    )
    train_and_score(spec)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": {
            path.relative_to(folder).as_posix(): hash_tensors(path)
            for path in sorted(folder.rglob("*.safetensors"))
            if "checkpoints" not in path.parts
        },
        "losses": [line["loss"] for line in lines if "loss" in line],
    }


def drop_unstable(value: Any) -> Any:
    """Return a summary without what differs from run to run."""
    if isinstance(value, dict):
        return {
            key: drop_unstable(entry)
            for key, entry in value.items()
            if not UNSTABLE_KEYS.search(key)
        }
    return [drop_unstable(entry) for entry in value] if isinstance(value, list) else value


def score_words(words: list[str], folder: Path) -> dict[str, Any]:
    """Score a drafter in a fixed tree and return its summary without times."""
    torch.manual_seed(0)
    config = compose_words("eval", [*words, *SCORING, f"run={folder}"])
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        spec, run = resolve_eval_spec(config)
    evaluate(spec, run)
    summary: dict[str, Any] = json.loads(next(folder.rglob("summary.json")).read_text())
    for path in folder.rglob("summary.json"):
        path.unlink()
    return {"summary": drop_unstable(summary)}


def export_drafter(start: Path, format_name: str, out: Path) -> dict[str, Any]:
    """Export a drafter in one format and return its files, tensors and texts."""
    export_command(str(start), format_name, str(out))
    texts = {
        path.name: path.read_text()
        for path in sorted(out.glob("*"))
        if path.suffix in (".json", ".md")
    }
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    binaries = {path.name: hash_bytes(path.read_bytes()) for path in out.glob("*.gguf")}
    tensors = {path.name: hash_tensors(path) for path in sorted(out.glob("*.safetensors"))}
    return {"files": sorted(files), "texts": texts, "tensors": tensors, "binaries": binaries}


def make_drafter(family: str, folder: Path, target: Target) -> dict[str, Any]:
    """Save a drafter of a family with random weights, as training would."""
    config = compose_words("train", [f"drafter={family}", "target=tiny", "tree=chain"])
    with open_dict(config):
        config.drafter.update(SMALL.get(family, {}))
    torch.manual_seed(0)
    module = build(config.drafter, target=target)
    counts = torch.randint(0, 1000, (target.head.vocab_size,))
    counts[target.tokenizer.all_special_ids] = 0
    module.prepare(target, counts)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    save_drafter(folder, module, RunSpec.from_nodes(config))
    return {}


def measure_all(scratch: Path) -> dict[str, Any]:
    """Return everything that must stay the same: part -> case -> what was measured."""
    register_resolvers("cpu")
    torch.set_num_threads(1)
    target = load_tiny()
    golden = dict[str, Any]()
    golden["training"] = {}
    for recipe in choice_files("recipe", conf_folders()):
        golden["training"][recipe] = attempt(
            partial(train_recipe, recipe, scratch / recipe, target),
            scratch,
        )
        print(f"trained {recipe}", file=sys.stderr, flush=True)
    golden["scores"] = {}
    cases = {name: (name, []) for name in SCORED_RECIPES} | {
        name: (name, [f"drafter={name}"]) for name in SCORED_CHOICES
    }
    for name, (folder, words) in cases.items():
        for tree in ("chain", "eagle2"):
            score = attempt(
                partial(score_words, [*words, f"tree={tree}", "tree.depth=4"], scratch / folder),
                scratch,
            )
            golden["scores"][f"{name} {tree}"] = score
        print(f"scored {name}", file=sys.stderr, flush=True)
    golden["exports"] = {}
    for family in sorted(list_constructors("drafter")):
        start = scratch / "drafters" / family
        # Some families change the layers of their target.
        made = attempt(partial(make_drafter, family, start, load_tiny()), scratch)
        golden["exports"][family] = made
        for format_name in () if made or family in SERVING_HINTS else EXPORT_FORMATS:
            out = scratch / "exports" / f"{family}-{format_name}"
            exported = attempt(partial(export_drafter, start, format_name, out), scratch)
            golden["exports"][f"{family} {format_name}"] = exported
        print(f"exported {family}", file=sys.stderr, flush=True)
    return golden


def list_differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield every difference between two measurements, as a line."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            missing = "(missing)"
            yield from list_differences(
                before.get(key, missing), after.get(key, missing), f"{path}/{key}"
            )
    elif before != after:
        yield f"{path}: {str(before)[:160]} -> {str(after)[:160]}"


def main() -> None:
    """Record or compare, as the command says."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "compare"):
        sys.exit("usage: python -m scripts.golden record|compare DIR")
    path = Path(sys.argv[2]) / "golden.json"
    with TemporaryDirectory(prefix="spectrain-golden-") as scratch:
        measured = measure_all(Path(scratch))
    if sys.argv[1] == "record":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")
        return print(f"{path}: written")
    path.with_name("compared.json").write_text(
        json.dumps(measured, indent=1, sort_keys=True) + "\n"
    )
    differences = list(list_differences(json.loads(path.read_text()), measured))
    print("\n".join([*differences, f"{len(differences)} differences"]))
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
