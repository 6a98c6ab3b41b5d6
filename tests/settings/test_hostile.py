"""Files of strangers are data: whatever stands in them, nothing is run, and one sentence says
what was refused.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from spectrain.cli.export import export_command, lint_command
from spectrain.config.build import GroupSpec, build
from spectrain.config.choices import list_constructors
from spectrain.config.spec import RunSpec
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, UserError
from spectrain.export.converter import convert
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import load_drafter, save_drafter
from spectrain.runs.init_drafter import apply_init_shape
from tests import commands
from tests.installed import select_installed

TINY = TargetFiles("tiny")
EVIL = (
    "from pathlib import Path\nPath({canary!r}).touch()\nclass Drafter:\n    def "
    "__init__(self, **_): pass\n"
)
WAYS = ("eval", "train", "convert", "lint --target")  # each reads files by functions of its own
ALL = (*WAYS, "chat", "export", "lint")
DEEP = 100_000


@pytest.fixture(scope="module")
def good_drafters(tmp_path_factory: pytest.TempPathFactory, tiny: Target) -> Path:
    """Write correct drafters, by layout."""
    folder = tmp_path_factory.mktemp("good")
    small: dict[str, dict[str, Any]] = {
        "causal": {"num_layers": 1},
        "eagle3": {"vocab_size": 64},
        "medusa": {"vocab_size": 2048, "num_heads": 1},
        "gated_lora": {"num_masks": 1, "rank": 2},
        "dflash": {"num_layers": 1, "block_size": 3},
        "dspark": {"num_layers": 1, "block_size": 3, "rank": 2},
        "peagle": {"num_layers": 1, "vocab_size": 64},
    }
    for name, options in select_installed("drafter", small).items():
        with initialize_config_module("spectrain.conf", version_base="1.3"):
            config = compose("train", overrides=[f"drafter={name}", "target=tiny", "tree=chain"])
        OmegaConf.set_struct(config, False)
        config.drafter.update(options)
        drafter: Drafter = build(config.drafter, target=tiny)
        drafter.prepare(tiny, torch.arange(tiny.head.vocab_size))
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        save_drafter(folder / name, drafter, RunSpec.from_nodes(config))
    run = folder / "run"
    shutil.copytree(folder / "causal", run / "drafter")
    (run / "config.yaml").write_text(
        "trainer: {choice: default, lr: 0.01}\neval: {choice: default, limit: 1}\n"
    )
    (run / "provenance.json").write_text("{}")
    for source, form in (
        ("eagle3", "vllm"),
        ("eagle3", "sglang"),
        ("medusa", "vllm"),
        ("medusa", "medusa"),
        ("causal", "hf"),
        ("gated_lora", "peft"),
        ("dflash", "vllm"),
        ("dflash", "sglang"),
        ("dflash", "hf"),
        ("dspark", "sglang"),
        ("peagle", "flat"),
    ):
        if (folder / source).exists():
            convert(folder / source, folder / f"{source}-{form}", form, TINY)
    return folder


def order(canary: Path) -> dict[str, Any]:
    """Return a node that hydra would run as a command."""
    return {
        "_target_": "huggingface_hub.utils._subprocess.run_subprocess",
        "command": f"touch {canary}",
    }


def set_key(file: str, *keys: str, value: Any) -> Callable[[Path, Path], None]:
    """Write a value into a JSON file, or into the order that it holds; a function gives it from
    the canary.
    """

    def edit(directory: Path, canary: Path) -> None:
        path = directory / file
        content = json.loads(path.read_text()) if path.exists() else {}
        node = content
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value(canary) if callable(value) else value
        path.write_text(json.dumps(content))

    return edit


def text(file: str, content: str | bytes) -> Callable[[Path, Path], None]:
    def edit(directory: Path, canary: Path) -> None:
        data = (
            content
            if isinstance(content, bytes)
            else content.replace("CANARY", str(canary)).encode()
        )
        (directory / file).write_bytes(data)

    return edit


def use_remote_code(directory: Path, canary: Path) -> None:
    """A target of the folder's own, whose code the file itself allows."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Drafter"}})
    )
    (model / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    (model / "evil.py").write_text(EVIL.format(canary=str(canary)))
    target = {"choice": "hf", "model": str(model), "trust_remote_code": True}
    set_key("config.json", "target", value=target)(directory, canary)


CONFIG = "config.json"
ARCHITECTURE = ("drafter", "architecture")
FILES: dict[str, tuple[str, Callable[[Path, Path], None], str]] = {
    # its own description
    "an order as architecture": ("causal", set_key(CONFIG, *ARCHITECTURE, value=order),
        "drafter.architecture._target_"),
    "an order within it": ("causal", set_key(CONFIG, *ARCHITECTURE, "rope", value=order),
        "drafter.architecture.rope._target_"),
    "an order in a list": (
        "causal", set_key(CONFIG, "drafter", "layers", value=lambda c: [order(c)]),
        "drafter.layers.0._target_"),
    "a command as family": ("causal", set_key(CONFIG, "drafter", value={"_target_": "os.system"}),
        "drafter=os.system"),
    "a command named": ("causal", set_key(CONFIG, "drafter", value=order), "drafter="),
    "a module beside it": ("causal", set_key(CONFIG, "drafter", value={"_target_": "evil.Drafter"}),
        "drafter=evil.Drafter"),
    "a module as choice": ("causal", set_key(CONFIG, "drafter", "choice", value="evil.Drafter"),
        "drafter=evil.Drafter"),
    "a path as choice": ("causal", set_key(CONFIG, "drafter", "choice", value="../../evil"),
        "drafter=../../evil"),
    "a choice that is no text": ("causal", set_key(CONFIG, "drafter", "choice", value=order),
        "drafter.choice"),
    "a choice and an order": ("causal",
        set_key(CONFIG, "drafter", "_target_", value="evil.Drafter"), "drafter."),
    "a choice of another group": ("causal", set_key(CONFIG, "drafter", "choice", value="tiny"),
        "drafter=tiny"),
    "a function of ours": (
        "causal", set_key(CONFIG, "target",
            value={"_target_": "spectrain.models.bundled.save_gguf"}), "target=",
    ),
    "partial": ("causal", set_key(CONFIG, "tree", "_partial_", value=True), "tree._partial_"),
    "arguments": ("causal", set_key(CONFIG, "acceptance", "_args_", value=["x"]),
        "acceptance._args_"),
    "recursion": ("causal", set_key(CONFIG, "drafter", "_recursive_", value=True),
        "drafter._recursive_"),
    "conversion": ("causal", set_key(CONFIG, "drafter", "_convert_", value="all"),
        "drafter._convert_"),
    "a runtime object": ("causal", set_key(CONFIG, "target", "network", value=order),
        "target.network"),
    "the environment": ("causal", set_key(CONFIG, "recipe", value="${oc.env:HOME}"), "recipe"),
    "a resolver": ("causal", set_key(CONFIG, "drafter", "loss", value="${cpu_gpu:a,b}"),
        "drafter.loss"),
    "remote code of a target": ("causal", use_remote_code, "target.trust_remote_code"),
    "remote code of a drafter": (
        "causal", set_key(CONFIG, *ARCHITECTURE, "auto_map", value={"AutoConfig": "evil.D"}),
        "auto_map"),
    "a kernel of the hub": (
        "causal", set_key(CONFIG, *ARCHITECTURE, "attn_implementation", value="evil/k"),
        "attn_implementation"),
    "a group that is none": ("causal", set_key(CONFIG, "../drafter", value={"choice": "causal"}),
        "../drafter"),
    "nested to no end": ("causal", text(CONFIG, "[" * DEEP), "nested"),
    "nested settings": ("causal",
        set_key(CONFIG, "training", value=json.loads("[" * 200 + "]" * 200)), "nested"),
    "bytes": ("causal", text(CONFIG, bytes(range(256))), "zero bytes"),
    "a list": ("causal", text(CONFIG, "[]"), "settings"),
    "a drafter of text": ("causal", set_key(CONFIG, "drafter", value="causal"), "drafter"),
    # beside it
    "an adapter's order": ("gated_lora", set_key("adapter_config.json", "x", value=order),
        "x._target_"),
    "an adapter's library": (
        "gated_lora",
        set_key("adapter_config.json", "auto_mapping", value={"parent_library": "evil"}),
        "parent_library",
    ),
    "an export's family": ("eagle3-sglang",
        set_key("spectrain.json", "drafter", "_target_", value="evil.Drafter"), "drafter."),
    "an export's choice": ("eagle3-sglang",
        set_key("spectrain.json", "drafter", "choice", value="ngram"), "drafter"),
    "an export's tree": ("eagle3-vllm",
        set_key("spectrain.json", "description", "tree", value=order), "tree="),
    "an export's rule": (
        "medusa-vllm", set_key("spectrain.json", "description", "acceptance", "x", value=order),
        "acceptance.x"),
    "an adapter's gate": ("gated_lora-peft", set_key("gated_lora.json", "rank", value=order),
        "rank._target_"),
    # other projects' layouts
    "EAGLE-3, flat": ("eagle3-sglang", set_key(CONFIG, "rope_scaling", value=order),
        "rope_scaling._target_"),
    "EAGLE-3, flat, remote": ("eagle3-sglang",
        set_key(CONFIG, "auto_map", value={"AutoModel": "evil.D"}), "auto_map"),
    "speculators": (
        "eagle3-vllm", set_key(CONFIG, "transformer_layer_config", "x", value=order),
        "transformer_layer_config.x._target_",
    ),
    "DFlash": (
        "dflash-vllm", set_key(CONFIG, "transformer_layer_config", "x", value=order),
        "transformer_layer_config.x._target_"),
    "DFlash, flat": ("dflash-sglang", set_key(CONFIG, "dflash_config", "x", value=order),
        "dflash_config.x._target_"),
    "DFlash, transformers": ("dflash-hf", set_key(CONFIG, "rope_parameters", "x", value=order),
        "rope_parameters.x._target_"),
    "DSpark, flat": ("dspark-sglang", set_key(CONFIG, "rope_parameters", value=order),
        "rope_parameters._target_"),
    "P-EAGLE, flat": ("peagle-flat", set_key(CONFIG, "pard_token", value=order),
        "pard_token._target_"),
    "Medusa": ("medusa-medusa", set_key(CONFIG, "base_model_name_or_path", value=order),
        "base_model_name_or_path._target_"),
    "Medusa of vLLM": ("medusa-vllm", set_key(CONFIG, "x", value="${oc.env:HOME}"), "x"),
    "transformers": ("causal-hf", set_key(CONFIG, "auto_map", value={"AutoConfig": "evil.Drafter"}),
        "auto_map"),
    "transformers, trusting": ("causal-hf", set_key(CONFIG, "trust_remote_code", value=True),
        "trust_remote_code"),
}  # fmt: skip
# Those of a package that is not installed are left out.
FILES = {
    name: case
    for name, case in FILES.items()
    if case[0].split("-")[0] in list_constructors("drafter")
}


EVERY_WAY = ("an order as architecture", "a module as choice", "an export's tree", "transformers")


def load_settings(name: str, directory: Path) -> Any:
    """Return the settings of a command and of the drafter in a folder."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        # the same words for every folder are composed once
        config = compose(name, overrides=["run=DIR"])
        config.run = str(directory)
        OmegaConf.set_struct(config, False)
        config.pop("chat", None)
        return resolve_eval_spec(config)


def open_drafter(name: str, directory: Path, tiny: Target) -> None:
    """Run a command up to where it decodes."""
    spec, folder = load_settings(name, directory)
    load_drafter(spec, folder, tiny)


def run_command(way: str, directory: Path, out: Path, tiny: Target) -> None:
    """Run a command without its start."""
    if way in ("eval", "chat"):
        open_drafter(way, directory, tiny)
    elif way == "train":
        drafter = {
            **GroupSpec("drafter", directory.name.split("-")[0]).node,
            "init": str(directory),
        }
        spec = RunSpec.from_config({"drafter": drafter, "target": GroupSpec("target", "tiny").node})
        load_drafter(apply_init_shape(spec), directory, tiny)
    elif way == "export":
        export_command(str(directory), "spectrain", str(out))
    elif way == "convert":
        convert(directory, out, "spectrain", TINY)
    else:
        lint_command(str(directory), GroupSpec("target", "tiny") if "--" in way else None)


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is made where anything of a stranger's runs; the working folder is importable, as
    under python -m.
    """
    return tmp_path / "canary"


@pytest.mark.sweep(20, free=("case",))
@pytest.mark.parametrize("case", FILES)
def test_nothing_of_a_stranger_runs(
    case: str,
    good_drafters: Path,
    canary: Path,
    tmp_path: Path,
    tiny: Target,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    """Every command refuses the file in one sentence that names what stands in it; lint calls it
    an error.
    """
    base, edit, named = FILES[case]
    directory = tmp_path / base
    shutil.copytree(good_drafters / base, directory)
    edit(directory, canary)
    (directory / "evil.py").write_text(EVIL.format(canary=str(canary)))
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    ways = ALL if case in EVERY_WAY else WAYS
    for way in ways[2:4] if case.startswith("an adapter") else ways:  # nobody else reads it
        with pytest.raises((UserError, RunError)) as error:
            run_command(way, directory, tmp_path / "out", tiny)
        sentence = str(error.value)
        assert isinstance(error.value, UserError) or (
            way.startswith("lint") and "error not-data" in capfd.readouterr().out
        )
        assert "\n" not in sentence and len(sentence) < 700
        assert named in sentence or way.startswith("lint"), (way, sentence)
        assert not canary.exists() and not (tmp_path / "out").exists() and "evil" not in sys.modules


RUNS: dict[str, tuple[str, str, str]] = {
    "python in yaml": ("config.yaml", "trainer: !!python/object/apply:os.system ['touch CANARY']\n",
        "YAML"),
    "a trainer": ("config.yaml", "trainer: {_target_: evil.Drafter}\n", "trainer=evil.Drafter"),
    "an order in the data": (
        "config.yaml",
        "data: {choice: embedded, limit: {_target_: os.system, command: touch CANARY}}\n",
        "data.limit._target_",
    ),
    "the environment": ("config.yaml", "eval: {choice: default, prompts: '${oc.env:HOME}'}\n",
        "eval.prompts"),
    "aliases": ("config.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "alias"),
    "nested to no end": ("config.yaml", "data: " + "[" * 2_000, "nested"),
    "a list": ("config.yaml", "- data\n", "settings"),
    "no key of a trainer": ("config.yaml", "trainer: {choice: default, callback: x}\n",
        "trainer.callback"),
    "a name that leads away": ("config.yaml", "eval: {choice: default, name: ../../escape}\n",
        "eval.name"),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_a_run_folder_holds_data(
    case: str, good_drafters: Path, canary: Path, tmp_path: Path, tiny: Target
) -> None:
    """config.yaml of a run is read like a drafter: nothing runs, and one sentence says why."""
    file, content, named = RUNS[case]
    shutil.copytree(good_drafters / "run", tmp_path / "run")
    text(file, content)(tmp_path / "run", canary)
    with pytest.raises(UserError) as error:
        spec, _ = load_settings("eval", tmp_path / "run")
        spec.eval.build()
    assert named in str(error.value) and "\n" not in str(error.value)
    assert not canary.exists()


def test_lint_reads_the_run_around_a_drafter(
    good_drafters: Path, tmp_path: Path, tiny: Target, capsys: Any
) -> None:
    """config.yaml of the run folder is linted with the drafter in it."""
    shutil.copytree(good_drafters / "run", tmp_path / "run")
    run_command("lint", tmp_path / "run", tmp_path, tiny)
    (tmp_path / "run" / "config.yaml").write_text("trainer: {_target_: evil.Drafter}\n")
    with pytest.raises(RunError):
        run_command("lint", tmp_path / "run", tmp_path, tiny)
    assert "error not-data" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", ["[]", "{", "\0\1", "[" * DEEP], ids=["list", "cut", "binary", "deep"]
)
def test_provenance_is_data(content: str, good_drafters: Path, tmp_path: Path) -> None:
    """A run whose provenance cannot be read is named in one sentence, and nothing is left half
    done.
    """
    shutil.copytree(good_drafters / "run", tmp_path / "run")
    (tmp_path / "run" / "provenance.json").write_text(content)
    with pytest.raises(UserError, match=r"provenance\.json: [^\n]*$"):
        export_command(str(tmp_path / "run"), "spectrain", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_no_yaml_names_is_never_imported(
    tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Construction itself refuses it, wherever the name came from, and constructs nothing within
    the settings.
    """
    (tmp_path / "evil.py").write_text(EVIL.format(canary=str(canary)))
    monkeypatch.syspath_prepend(str(tmp_path))
    for node in ({"_target_": "evil.Drafter"}, {"_target_": "evil"}, order(canary)):
        with pytest.raises(UserError, match="no choice of conf/ names it"):
            build(node)
    with pytest.raises(UserError, match=r"data\.limit\._target_ is an order"):
        build({"_target_": "spectrain.data.readers.EmbeddedReader", "limit": order(canary)})
    assert not canary.exists()


@pytest.mark.sweep(1, free=("words",))
@pytest.mark.parametrize(
    "words", [("eval", "run=causal", "target=tiny"), ("lint", "causal")], ids=lambda words: words[0]
)
def test_from_the_shell(
    words: tuple[str, ...], good_drafters: Path, canary: Path, tmp_path: Path
) -> None:
    """The full program refuses the files in a process that can import them, as under python -m."""
    shutil.copytree(good_drafters / "causal", tmp_path / "causal")
    (tmp_path / "evil.py").write_text(EVIL.format(canary=str(canary)))
    set_key(CONFIG, *ARCHITECTURE, value={"_target_": "evil.Drafter"})(tmp_path / "causal", canary)
    status, out, err = commands.start(
        words, os.environ, tmp_path, commands.spectrain_in_folder
    ).wait()
    assert status == (1 if words[0] == "lint" else 2), err
    assert err.startswith("spectrain: ") and err.count("\n") == 1, err
    assert "drafter.architecture._target_" in err + out
    assert not canary.exists() and not list(tmp_path.glob("runs"))


def test_nothing_else_is_needed(good_drafters: Path, tmp_path: Path, tiny: Target) -> None:
    """Without the strangers' hands on them, the same files are read by every command."""
    for base in (
        "causal",
        "gated_lora",
        "eagle3-sglang",
        "eagle3-vllm",
        "medusa-vllm",
        "medusa-medusa",
        "causal-hf",
        "dflash-vllm",
        "dflash-sglang",
    ):
        for way in ("eval", "convert", "lint") if (good_drafters / base).exists() else ():
            run_command(way, good_drafters / base, tmp_path / base, tiny)
