"""`spectrain export`: what it writes, the model card, what is refused, transformers as a client,
the upload.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain.cli.export import export_command
from spectrain.cli.main import main
from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.export.layouts import select_layout
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.runs.defaults import load_saved_settings
from spectrain.runs.drafters import save_drafter
from tests.export.test_converter import ours, settings_for
from tests.installed import load_cases

SUMMARY: dict[str, Any] = {
    "acceptance_length": {"pooled": 2.3456, "ci95": [2.1, 2.6]},
    "speedup": {"ratio": 1.2345, "ci95": [1.1, 1.4]},
    "lossless": {"identical": 17, "checked": 17},
    "tree": {"name": "eagle2", "depth": 5, "budget": 16},
    "compared": {},
    "setting": {
        "target": "tiny",
        "prompts": 17,
        "max_new_tokens": 99,
        "rule": "greedy",
        "batch_size": 1,
        "dtype": "float32",
        "device": "a processor",
        "commit": "0123456789abcdef",
        "versions": {"torch": "9.9"},
        "date": "2031-01-02T03:04:05",
    },
}


def make_run(folder: Path, tiny: Target, drafter: str, **options: Any) -> Path:
    ours(folder / "drafter", tiny, drafter, **options)
    return folder


def export_run(run: Path, form: str, out: Path, **options: Any) -> Path:
    return export_command(str(run), form, str(out), **options)


def test_card_holds_the_measured_numbers_with_their_setting(tiny: Target, tmp_path: Path) -> None:
    """Numbers come from eval/*/summary.json alone, rounded; training's agreement is no score."""
    run = make_run(tmp_path / "run", tiny, "eagle3", vocab_size=256)
    (run / "metrics.jsonl").write_text('{"step": 1, "agreement": 0.7654}\n')
    (run / "eval" / "heldout").mkdir(parents=True)
    (run / "eval" / "heldout" / "summary.json").write_text(json.dumps(SUMMARY))
    card = (export_run(run, "vllm", tmp_path / "out") / "README.md").read_text()
    for words in (
        "2.35 [2.10, 2.60]",
        "1.23 [1.10, 1.40]",
        "17 of 17",
        "17 prompts, 99 tokens",
        "torch 9.9",
        "2031-01-02",
        "tiny",
    ):
        assert words in card
    assert "0.76" not in card and "eagle2 depth 5 budget 16" in card
    assert (
        f'"method": "eagle3", "model": "{tmp_path / "out"}"' in card
        and "vllm serve" in card
        and "base_model" not in card
    )


def test_card_promises_no_more_than_the_table(tiny: Target, tmp_path: Path) -> None:
    """A speedup that is not to be quoted is left out, with the reason; a lossy rule is named."""
    run = make_run(tmp_path / "run", tiny, "eagle3", vocab_size=256)
    doubtful = {
        "ratio": 7.31,
        "ci95": [1.5, 9.5],
        "quotable": False,
        "reason": "steps were unsteady",
    }
    lossy = {"rule": "typical", "lossless": False, "checked": 0, "identical": 0}
    (run / "eval" / "noisy").mkdir(parents=True)
    (run / "eval" / "noisy" / "summary.json").write_text(
        json.dumps({**SUMMARY, "speedup": doubtful, "lossless": lossy})
    )
    card = (export_run(run, "vllm", tmp_path / "out") / "README.md").read_text()
    assert (
        "steps were unsteady" in card
        and "LOSSY: acceptance=typical" in card
        and "| lossy |" in card
    )
    assert "lossless" not in card and "by construction" not in card
    assert "not to be quoted" in card and "7.31" not in card and "9.50" not in card


def test_card_says_that_sampled_answers_were_not_checked(tiny: Target, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny, "eagle3", vocab_size=256)
    sampled = {"rule": "recursive", "lossless": True, "checked": 0, "identical": 0}
    (run / "eval" / "heldout").mkdir(parents=True)
    (run / "eval" / "heldout" / "summary.json").write_text(
        json.dumps({**SUMMARY, "lossless": sampled})
    )
    card = (export_run(run, "vllm", tmp_path / "out") / "README.md").read_text()
    assert (
        "| not checked |" in card
        and "Rule recursive: the output has the target's distribution by construction" in card
    )


def test_card_simulates_the_measured_acceptance(tiny: Target, tmp_path: Path) -> None:
    """Rates by position are products of the chain's rates by depth, and their number is that of
    the drafted tokens.
    """
    run = make_run(tmp_path / "run", tiny, "eagle3", vocab_size=256)
    (run / "eval" / "heldout").mkdir(parents=True)
    chain = {**SUMMARY, "tree": {"name": "chain", "depth": 2}, "acceptance_by_depth": [0.5, 0.25]}
    (run / "eval" / "heldout" / "summary.json").write_text(
        json.dumps({**SUMMARY, "compared": {"chain": chain}})
    )
    card = (export_run(run, "sglang", tmp_path / "out") / "README.md").read_text()
    assert (
        '"synthetic_acceptance_rates": [0.5, 0.125, 0.0]' in card
        and "SGLANG_SIMULATE_ACC_LEN=1.625" in card
    )
    (run / "eval" / "heldout" / "summary.json").write_text(json.dumps({**chain, "server": {}}))
    assert (
        "Simulated" not in (export_run(run, "sglang", tmp_path / "other") / "README.md").read_text()
    )


def test_card_without_a_score_says_so(tiny: Target, tmp_path: Path) -> None:
    """A drafter that was never scored has no number on its card."""
    run = make_run(tmp_path / "run", tiny, "eagle3", vocab_size=256)
    assert "not scored" in (export_run(run, "sglang", tmp_path / "out") / "README.md").read_text()


# Cases of installed packages.
CASES = load_cases(__name__)
SERVED = {
    "eagle3 vllm": {"vLLM", "spectrain"},
    "eagle3 sglang": {"SGLang", "vLLM", "spectrain"},
    "medusa medusa": {"spectrain"},
    "medusa vllm": {"vLLM up to 0.32", "spectrain"},
    "causal hf": {"vLLM", "SGLang", "transformers", "spectrain"},
    "pard hf": {"vLLM", "spectrain"},
    "dflash vllm": {"vLLM", "spectrain"},
    "dflash sglang": {"SGLang", "vLLM", "spectrain"},
    "dflash hf": {"transformers", "spectrain"},
    "dspark vllm": {"vLLM", "spectrain"},
    "dspark sglang": {"SGLang", "vLLM", "spectrain"},
    "dflash2 sglang": {"SGLang", "vLLM", "spectrain"},
    "peagle flat": {"vLLM", "spectrain"},
    **CASES.get("SERVED", {}),
}


@pytest.mark.sweep(4, free=("case",))
@pytest.mark.parametrize("case", SERVED)
def test_card_has_a_command_for_every_engine_that_serves_it(
    case: str, tiny: Target, tmp_path: Path
) -> None:
    """The engines named are those that read the layout, and no other."""
    family, form = case.split()
    options: dict[str, Any] = (
        {"vocab_size": 2048} if family in ("eagle3", "medusa") else {"num_layers": 2}
    )
    options = CASES.get("OPTIONS", {}).get(case, options)
    card = (
        export_run(make_run(tmp_path / "run", tiny, family, **options), form, tmp_path / "out")
        / "README.md"
    ).read_text()
    titles = re.findall(r"^(\S+(?: (?:up to|from) [\d.]+)?):$", card, re.MULTILINE)
    assert {*titles} - {"tags"} == SERVED[case]


def test_flat_layout_is_not_for_vllm_where_it_numbers_layers_otherwise(
    tiny: Target, tmp_path: Path
) -> None:
    """With other layers than the default the two engines read one flat file differently, so only
    one is named.
    """
    run = make_run(tmp_path / "run", tiny, "eagle3", vocab_size=256, layers=[1, 3, 6])
    out = export_run(run, "sglang", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["eagle_config"][
        "eagle_aux_hidden_state_layer_ids"
    ] == [0, 2, 5]
    assert (
        "sglang.launch_server" in (out / "README.md").read_text()
        and "vllm serve" not in (out / "README.md").read_text()
    )


MISTAKES = {
    "no format": ({}, "format"),
    "an unknown format": ({"format": "vlm"}, "vllm"),
    "a family without an engine": ({"format": "mtp"}, "vllm"),
    "nothing there": ({"format": "vllm", "run": "nowhere"}, "nowhere"),
    "a folder in use": ({"format": "vllm", "out": "."}, "another folder"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named_before_anything_is_written(
    case: str, tiny: Target, tmp_path: Path, monkeypatch: Any
) -> None:
    """The error names the word that helps, and no output folder is made."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", tiny, "eagle3", vocab_size=256)
    changes, word = MISTAKES[case]
    with pytest.raises(UserError, match=word):
        export_command(**{"run": "run", "format": None, "out": "out", **changes})
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Return a function that runs a command as the shell does, in a folder of its own, and
    returns its status and output.
    """
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["spectrain", *command.split()])
        capsys.readouterr()
        try:
            status: Any = main()
        except SystemExit as stopped:
            status = stopped.code
        shown = capsys.readouterr()
        return status or 0, shown.out + shown.err

    return run


def test_convert_and_lint_take_a_run_folder_and_settings(
    run_command: Any, tiny: Target, tmp_path: Path
) -> None:
    """A run folder or its drafter directory, by position or as settings, gives the same files
    and findings.
    """
    make_run(tmp_path / "run=1", tiny, "eagle3", vocab_size=256)
    commands = {
        "places": "run=1 places --to vllm --target tiny",
        "settings": "run=run=1 format=vllm out=settings target=tiny",
        "directory": "format=vllm run=1/drafter --target=tiny out=directory",
    }
    for out, words in commands.items():
        status, shown = run_command(f"convert {words}")
        assert status == 0 and shown.endswith(f"written to {out}\n"), shown
    written = {
        out: {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in commands
    }
    assert (
        written["places"] == written["settings"] == written["directory"]
        and "model.safetensors" in written["places"]
    )
    for words in ("run=1", "run=run=1", "run=1/drafter", "run=run=1/drafter"):
        status, shown = run_command(f"lint {words}")
        assert (status, "run=1/drafter" in shown, "no error" in shown) == (0, True, True), shown
    config = json.loads((tmp_path / "places" / "config.json").read_text())
    (tmp_path / "places" / "config.json").write_text(
        json.dumps({**config, "draft_vocab_size": 255})
    )
    status, shown = run_command("lint places --target tiny")
    assert status == 1 and "errors" in shown


def test_dflash_from_the_shell(run_command: Any, tiny: Target, tmp_path: Path) -> None:
    """Exported for both engines, its commands name the method and the block whatever the folder is
    called; lint finds the trap that is put into it, and what an engine cannot hold stops with
    status 2."""
    make_run(tmp_path / "run", tiny, "dflash", block_size=5, num_layers=2)
    for form, folder in (("vllm", "one"), ("sglang", "other")):
        status, shown = run_command(f"export run=run format={form} out={folder}")
        assert status == 0 and shown.startswith("DFlash, "), shown
        assert run_command(f"lint {folder}")[0] == 0
    vllm, both = ((tmp_path / folder / "README.md").read_text() for folder in ("one", "other"))
    assert (
        '{"method": "dflash", "model": "one", "num_speculative_tokens": 4}' in vllm
        and "sglang" not in vllm
    )
    assert '{"method": "dflash", "model": "other", "num_speculative_tokens": 4}' in both
    assert (
        "--speculative-algorithm DFLASH --speculative-draft-model-path other "
        "--speculative-num-draft-tokens 5\n" in both
    )
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    (tmp_path / "one" / "config.json").write_text(
        json.dumps({**config, "sliding_window_non_causal": False})
    )
    status, shown = run_command("lint one")
    assert (
        status == 1
        and "error block-causality: full-attention layers" in shown
        and "warnings" in shown
    )
    make_run(
        tmp_path / "shifted", tiny, "dflash", block_size=5, num_layers=2, sample_from_anchor=True
    )
    status, shown = run_command("export run=shifted format=vllm out=wrong")
    assert (
        status == 2
        and "sample_from_anchor: in a shifted block" in shown
        and not (tmp_path / "wrong").exists()
    )


WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"vocab_size": 2048, "num_heads": 1}),
    "causal": ("hf", {"num_layers": 1}),
    "pard": ("hf", {"num_layers": 1}),
    **CASES.get("WIDE", {}),
}


@pytest.mark.sweep(2, free=("family",))
@pytest.mark.parametrize("family", WIDE)
def test_weights_of_another_width_are_refused(
    family: str, run_command: Any, tiny: Target, tmp_path: Path
) -> None:
    """Without a target, too: convert and export say in one sentence which tensor is not as
    config.json says, and lint finds it; before, nothing is wrong."""
    form, options = WIDE[family]
    make_run(tmp_path / "run", tiny, family, **options)
    assert run_command("lint run")[0] == 0
    for path in (tmp_path / "run" / "drafter").glob("*.safetensors"):
        wider = {
            name: tensor.repeat_interleave(2, -1) if tensor.dim() > 1 else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(wider, path)
    for words in (f"convert run --to {form} out", f"export run=run format={form} out=out"):
        status, shown = run_command(words)
        assert status == 2 and shown.count("\n") == 1 and "and config.json implies" in shown, shown
        assert not (tmp_path / "out").exists()
    status, shown = run_command("lint run")
    assert status == 1 and "wrong-shape" in shown


def test_transformers_decodes_with_an_exported_draft(tiny: Target, tmp_path: Path) -> None:
    """`assistant_model` with the exported GKD draft gives the tokens of plain `generate`."""
    out = export_run(
        make_run(tmp_path / "run", tiny, "causal", num_layers=2), "hf", tmp_path / "out"
    )
    plain, drafted = generate_both(
        tiny.path, assistant_model=AutoModelForCausalLM.from_pretrained(out)
    )
    assert plain == drafted


def generate_both(path: str | Path, **options: Any) -> tuple[list[int], list[int]]:
    """Return greedy tokens of transformers without and with its own drafting."""
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(
        "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n",
        return_tensors="pt",
    )
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    both = [
        model.generate(**inputs, do_sample=False, max_new_tokens=32, **extra)[0].tolist()
        for extra in ({}, options)
    ]
    return both[0], both[1]


def test_transformers_exits_an_exported_target_early(tmp_path: Path) -> None:
    """A LayerSkip run becomes a plain model, which names its exits and decodes with
    `assistant_early_exit`.
    """
    target = load_tiny()
    config = settings_for("early_exit", exit_layer=3)
    from spectrain.drafters.early_exit import EarlyExit

    with torch.no_grad():
        target.layers[0].mlp.down_proj.weight.mul_(1.01)  # type: ignore[union-attr]
    save_drafter(
        tmp_path / "run" / "drafter", EarlyExit(target, exit_layer=3), RunSpec.from_nodes(config)
    )
    target.save(tmp_path / "run" / "target")
    out = export_run(tmp_path / "run", "hf", tmp_path / "out")
    exits = json.loads((out / "spectrain.json").read_text())["exits"]
    assert exits == {"trained": [1, 2, 3, 4, 5, 6, 7], "default": 3}
    plain, drafted = generate_both(out, assistant_early_exit=3)
    assert plain == drafted
    assert "assistant_early_exit=3" in (out / "README.md").read_text()
    with pytest.raises(
        UserError,
        match=rf"^{out}: this is a target that exits early, not a drafter; use it as target=hf",
    ):
        load_saved_settings(out, GroupSpec("target"))


def test_medusa_2_brings_its_target(tmp_path: Path) -> None:
    """Heads that were trained with their target are exported with it, and served with it."""
    target = load_tiny()
    with torch.no_grad():
        target.layers[0].mlp.down_proj.weight.mul_(1.01)  # type: ignore[union-attr]
    ours(tmp_path / "run" / "drafter", target, "medusa", adapt="full")
    target.save(tmp_path / "run" / "target")
    out = export_run(tmp_path / "run", "vllm", tmp_path / "out")
    assert torch.equal(
        load_file(out / "target" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"],
        target.layers[0].mlp.down_proj.weight,  # type: ignore[union-attr]
    )
    assert f"vllm serve {out / 'target'}" in (out / "README.md").read_text()


class HubStandIn(BaseHTTPRequestHandler):
    """Answers the requests of an upload as the hub does, and records them."""

    requests: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append((self.path, body))
        address = f"http://{self.headers['Host']}"
        if self.path.endswith("/repos/create"):
            self.send_json({"url": f"{address}/org/drafter"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.send_json(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        elif "/commit/" in self.path:
            self.send_json(
                {"commitUrl": f"{address}/org/drafter/commit/1", "commitOid": "1", "success": True}
            )
        else:
            self.send_json({})

    def do_GET(self) -> None:
        self.requests.append((self.path, b""))
        self.send_json({"id": "org/drafter", "sha": "0", "siblings": []})

    def send_json(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Start a stand-in for the hub; yield its address and the requests that it received."""
    requests: list[tuple[str, bytes]] = []
    handler = type("Here", (HubStandIn,), {"requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()


def test_nothing_is_uploaded_unasked(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without push the upload is never reached."""
    monkeypatch.setattr("spectrain.cli.export.upload", lambda *_: pytest.fail("uploaded"))
    export_run(
        make_run(tmp_path / "run", tiny, "eagle3", vocab_size=64),
        "sglang",
        tmp_path / "out",
        push=None,
    )


def test_upload_sends_the_folder_and_says_so(
    hub: tuple[str, list[tuple[str, bytes]]],
    tiny: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_command: Any,
) -> None:
    """Every file of the folder goes into a private repository, each named before."""
    address, requests = hub
    make_run(tmp_path / "run", tiny, "eagle3", vocab_size=64)
    for name, value in {
        "ENDPOINT": address,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "none")
    status, printed = run_command("export run=run format=sglang out=out push=org/drafter")
    assert not status, printed
    created = json.loads(next(body for path, body in requests if path.endswith("/repos/create")))
    assert "private" in (
        created.get("visibility"),
        *(key for key in created if created[key] is True),
    )
    assert created["name"] == "drafter" and created["organization"] == "org"
    lines = next(body for path, body in requests if "/commit/" in path).decode().splitlines()
    sent = {
        json.loads(line)["value"]["path"] for line in lines if json.loads(line)["key"] == "file"
    }
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert (
        sent == names
        and all(name in printed for name in names)
        and "org/drafter, private" in printed
    )


@pytest.mark.parametrize("form", ["vllm", "spectrain"])
def test_a_family_that_no_layout_holds_is_refused(form: str) -> None:
    """A family from outside the repository has no other format that could be named."""
    with pytest.raises(
        UserError,
        match=rf"format={form}: no layout of an engine supports drafter=recurrent; score it",
    ):
        select_layout("recurrent", form)
