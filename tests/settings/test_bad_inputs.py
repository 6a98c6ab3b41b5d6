"""Bad numbers, weights, data and prompts: each ends in one sentence, before anything is written."""

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import spectrain
from spectrain.cli.chat import Chat, TerminalChat
from spectrain.cli.main import with_exit_codes
from spectrain.cli.overrides import check_words
from spectrain.config.build import build
from spectrain.config.check import check_overrides
from spectrain.config.choices import load_schema
from spectrain.config.spec import RunSpec
from spectrain.data.readers import JsonlReader
from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.causal import Causal
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.prompts import read_prompts
from spectrain.export.card import format_row, render_card
from spectrain.export.converter import read_drafter
from spectrain.export.layouts import select_layout
from spectrain.export.linter import lint
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.runs.drafters import load_drafter, save_drafter
from spectrain.runs.resume import InputFacts
from spectrain.runs.train import write_settings
from spectrain.training.checkpoints import resume_advice
from spectrain.trees import Chain

NUMBERS = {
    "trainer.lr=nan": "finite", "trainer.lr=-1": "above 0", "trainer.clip=nan": "more than 0",
    "trainer.clip=-1": "more than 0",
    "trainer.clip=inf": "finite", "trainer.betas=[2,3]": "less than 1",
    "trainer.weight_decay=nan": "0 or more",
    "trainer.weight_decay=-1": "0 or more", "trainer.warmup=2": "1 or less",
    "trainer.min_lr=-1": "0 or more",
    "drafter.ttt_steps=0": "1 or more", "drafter.ttt_steps=100000": "64 or less",
    "drafter.vocab_size=-1": "2 or more",
    "drafter.vocab_size=1": "2 or more", "drafter.vocab_size=999999999": "1000000 or less",
    "drafter.layers=[]": "at least one",
    "drafter.layers=[99]": "99 is not a layer of tiny", "trainer.seed=-1": "0 or more",
    "trainer.seed=99999999999999999999": "2147483647 or less",
    "trainer.betas=[0.9]": "(tuple[float, float])",
    "drafter.step_decay=nan": "", "acceptance.temperature=nan": "", "tree.depth=0": "",
}  # fmt: skip


@pytest.mark.parametrize("word", NUMBERS)
def test_numbers_out_of_bounds_are_refused(word: str, tiny: Target) -> None:
    """Numbers are refused by the declared type, when their word is read, or by the constructor."""
    group, _, rest = word.partition(".")
    name, _, value = rest.partition("=")
    words = ["recipe=eagle3", "tree=eagle2", "acceptance=match", word]
    targets = {
        "trainer": "spectrain.training.trainer.Trainer",
        "tree": "spectrain.trees.Eagle2",
        "acceptance": "spectrain.decoding.acceptance.Match",
        "drafter": "spectrain.drafters.eagle3.Eagle3",
    }
    with pytest.raises(UserError) as error:
        check_overrides(load_schema("train"), words)
        build(
            {"_target_": targets[group], name: json.loads(value)},
            **({"target": tiny} if group == "drafter" else {}),
        )
    assert str(error.value).startswith(f"{group}.{name}") and NUMBERS[word] in str(error.value)


def test_a_device_that_is_not_there() -> None:
    """A GPU that this machine has not, or none by such a name."""
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(UserError, match=rf"target\.device={device}: this machine has"):
            load_tiny(device=device)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 999_999_999},
        {"hidden_size": 10**6},
        {"hidden_size": "wide"},
        {"model_type": "evil"},
        {"num_hidden_layers": -1},
    ],
)
def test_an_architecture_that_cannot_be(change: dict[str, Any], tiny: Target) -> None:
    """No memory is taken for it."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with pytest.raises(UserError, match=r"drafter\.architecture: [^\n]*$"):
        Causal(tiny, architecture={**small, **change})


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory, tiny: Target) -> Path:
    """Save a small Medusa as training leaves it."""
    directory = tmp_path_factory.mktemp("saved") / "medusa"
    node = {"_target_": "spectrain.drafters.medusa.Medusa", "num_heads": 1, "vocab_size": 64}
    drafter = build(node, target=tiny)
    drafter.prepare(tiny, torch.arange(tiny.head.vocab_size))
    target = {"_target_": "spectrain.models.loading.load_tiny"}
    save_drafter(directory, drafter, RunSpec.from_nodes({"drafter": node, "target": target}))
    return directory


def add_nan(tensors: dict[str, Any]) -> None:
    tensors["heads.0.lm_head.weight"][0, 0] = float("nan")


def make_fractional(tensors: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + 0.5


def add_nan_of_one_byte(tensors: dict[str, Any]) -> None:
    add_nan(tensors)
    name = "heads.0.lm_head.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def make_whole(tensors: dict[str, Any]) -> None:
    name = "heads.0.lm_head.weight"
    tensors[name] = (100 * tensors[name]).to(torch.int8)


def make_complex(tensors: dict[str, Any]) -> None:
    name = "heads.0.lm_head.weight"
    tensors[name] = tensors[name].to(torch.complex64)


def make_truth_values(tensors: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"].bool()


def widen_tensors(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("heads")]:
        tensors[name] = tensors[name].repeat_interleave(2, dim=-1)


def shift_ids(tensors: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + 5000


def repeat_id(tensors: dict[str, Any]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def mark_other_token(tensors: dict[str, Any]) -> None:
    first = int(tensors["d2t"][0])
    tensors["t2d"][first] = False


WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], None], type[Exception], str]] = {
    "not finite": (add_nan, UserError, r"model\.safetensors: heads\.0\.lm_head\.weight holds NaN"),
    "of another width": (
        widen_tensors,
        UserError,
        r"model\.safetensors: it does not fit .*, \[256\] in place of \[128\], and 2 more",
    ),
    "fractions": (make_fractional, UserError, r"d2t holds fractions"),
    "not finite, in one byte": (
        add_nan_of_one_byte,
        UserError,
        r"heads\.0\.lm_head\.weight holds 8-bit floats without",
    ),
    "integers": (make_whole, UserError, r"heads\.0\.lm_head\.weight holds no real numbers"),
    "complex": (make_complex, UserError, r"heads\.0\.lm_head\.weight holds no real numbers"),
    "truth values": (make_truth_values, UserError, r"d2t holds no integers"),
    "ids astray": (shift_ids, UserError, r"d2t: some ids are not among the target's 2048 tokens"),
    "one token twice": (repeat_id, UserError, r"d2t: two of its drafts are the same token"),
    "other marks": (mark_other_token, UserError, r"t2d: it marks other tokens than those that d2t"),
}


@pytest.mark.sweep(3, free=("case",))
@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_wrong(
    case: str, drafter_folder: Path, tmp_path: Path, tiny: Target
) -> None:
    """A short sentence names the tensor, and nothing is decoded with such weights."""
    change, kind, sentence = WEIGHTS[case]
    shutil.copytree(drafter_folder, tmp_path / "medusa")
    tensors = load_file(drafter_folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "medusa" / "model.safetensors",
    )
    node = {"_target_": "spectrain.drafters.medusa.Medusa", "num_heads": 1, "vocab_size": 64}
    with pytest.raises(kind, match=sentence) as error:
        load_drafter(RunSpec.from_nodes({"drafter": node}), tmp_path / "medusa", tiny)
    assert len(str(error.value).replace(str(tmp_path), "")) < 200
    assert any(
        finding.level == "error" for finding in lint(tmp_path / "medusa", TargetFiles("tiny"))
    )


OURS: dict[str, Any] = {
    "a list for a number": {"drafter": {"choice": "medusa", "head_decay": [1]}},
    "no drafter": {"drafter": None},
    "a tree of text": {"tree": "chain"},
    "an unknown key": {"tree": {"choice": "chain", "deep": 3}},
}


@pytest.mark.parametrize("case", OURS)
def test_values_of_wrong_kinds_in_our_own_layout(
    case: str, drafter_folder: Path, tmp_path: Path
) -> None:
    """What eval refuses, lint calls an error, and nobody converts or exports it."""
    shutil.copytree(drafter_folder, tmp_path / "medusa")
    content = json.loads((drafter_folder / "config.json").read_text())
    (tmp_path / "medusa" / "config.json").write_text(json.dumps({**content, **OURS[case]}))
    assert any(finding.level == "error" for finding in lint(tmp_path / "medusa", None))
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        read_drafter(tmp_path / "medusa")


KINDS: dict[str, Any] = {
    "text for a number": {"medusa_num_heads": "many"},
    "a list for a number": {"medusa_num_heads": [1]},
    "nothing for a number": {"medusa_num_heads": None},
    "a negative number": {"medusa_num_heads": -3},
}


@pytest.mark.parametrize("case", KINDS)
def test_values_of_wrong_kinds(case: str, tmp_path: Path) -> None:
    """A layout's settings of the wrong type are refused by lint, as a finding or in one
    sentence, and by everything else.
    """
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1, **KINDS[case]})
    )
    save_file({"0.0.linear.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    try:
        assert any(finding.level == "error" for finding in lint(tmp_path, None))
    except UserError as error:
        assert "medusa_num_heads" in str(error)
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        read_drafter(tmp_path)


def test_a_score_of_a_single_prompt_has_a_card(drafter_folder: Path, tmp_path: Path) -> None:
    """Where there were too few prompts for an interval, the card gives none."""
    entry = {
        "acceptance_length": {"pooled": 1.5, "ci95": None},
        "speedup": {"ratio": 1.25, "ci95": [None, None]},
    }
    assert format_row(entry) == "1.50 | 1.25 | not checked"
    drafter = read_drafter(drafter_folder)
    run = tmp_path / "run"
    (run / "eval" / "heldout").mkdir(parents=True)
    (run / "eval" / "heldout" / "summary.json").write_text(json.dumps({**entry, "setting": {}}))
    assert "| 1.50 | 1.25 |" in render_card(
        drafter, select_layout(drafter.family, "vllm"), TargetFiles("tiny"), "here", run
    )


def make_line(content: Any) -> str:
    return json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]}
    )


DATA: dict[str, tuple[str, str]] = {
    "half a character": (make_line("\ud800"), r"line 1: message 2: its text holds \\ud800"),
    "nested": ("[" * 100_000, "line 1: its values are nested too deeply"),
    "a text of 12 MB": (
        make_line("a" * 12_000_000),
        r"line 1: message 2: a text of 12,000,000 characters",
    ),
    "2,000 turns": (
        json.dumps({"messages": [{"role": "user", "content": "Hi"}] * 2000}),
        "line 1: a conversation of 2000 turns",
    ),
    "empty answers": (make_line(" "), "line 1: its answers are empty"),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_learnt(case: str, tmp_path: Path) -> None:
    """The line is named at once, and what to do."""
    content, sentence = DATA[case]
    (tmp_path / "data.jsonl").write_text(content + "\n")
    with pytest.raises(UserError, match=sentence):
        JsonlReader(str(tmp_path / "data.jsonl")).load_conversations()


def test_folders_without_data(tmp_path: Path) -> None:
    """An empty folder is not a missing file, and a folder is no file whatever its name."""
    with pytest.raises(UserError, match="the folder holds no data file"):
        JsonlReader(str(tmp_path)).load_conversations()
    (tmp_path / "data.jsonl").mkdir()
    with pytest.raises(UserError, match="this is no file"):
        JsonlReader(str(tmp_path)).load_conversations()
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="UTF-8"):
        JsonlReader(str(tmp_path / "bytes.jsonl")).load_conversations()


@pytest.mark.parametrize(
    "content, sentence",
    [
        (json.dumps({"prompt": "\ud800"}), r"line 1: its text holds \\ud800"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"prompt": "a" * 3_000_000}), "a text of 3,000,000 characters"),
        (json.dumps({"turns": ["Hi"] * 2000}), "line 1: a prompt of 2000 turns"),
    ],
    ids=["half a character", "nested", "long", "turns"],
)
def test_prompts_that_cannot_be_used(content: str, sentence: str, tmp_path: Path) -> None:
    """As of data, the line is named."""
    (tmp_path / "prompts.jsonl").write_text(content + "\n")
    with pytest.raises(UserError, match=sentence):
        read_prompts(str(tmp_path / "prompts.jsonl"))


def test_chats_that_cannot_be_held() -> None:
    """Bytes of the shell or of stdin that are no text are refused, and so is an empty text."""
    for settings, sentence in (
        ({"once": "\udcff"}, "--once: its text holds"),
        ({"once": " "}, "--once: the text is empty"),
        ({"system": "\ud800"}, "chat.system: its text holds"),
    ):
        with pytest.raises(UserError, match=sentence):
            Chat(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"\xed\xa0\x80"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_lines_that_are_no_text(line: bytes, errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(line), encoding="utf-8", errors=errors)
    )
    with pytest.raises(UserError, match="standard input: it"):
        TerminalChat.answer_lines(SimpleNamespace(screen=None, settings=SimpleNamespace(raw=False)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "word", ["target=null", "~target=3", "target=[3]", "tree=None", "target={a: 1}"]
)
def test_choices_of_a_wrong_type(word: str) -> None:
    """A group takes the names of its choices, and null is none."""
    with pytest.raises(
        UserError, match=r"^(target|tree)=.*: there is no such choice; (valid are|the nearest is) "
    ):
        check_words("data regenerate", [word])


@pytest.mark.parametrize("word", ["eval.prompts=", "data.path=", "target.device="])
def test_values_that_are_empty(word: str) -> None:
    """An empty path is the working folder to Python, and hardly to anybody else."""
    with pytest.raises(UserError, match=f"^{word}: it is empty"):
        check_overrides(load_schema("train"), ["recipe=eagle3", "data=jsonl", "target=tiny", word])


def test_what_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever a file is another user's, its name is said, without a traceback."""

    def task(_: Any) -> None:
        raise PermissionError(13, "Permission denied", "drafter/config.json")

    with pytest.raises(SystemExit) as left:
        with_exit_codes(task)(None)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("spectrain: drafter/config.json: Permission denied; ")


def test_a_full_disk_says_what_there_is_to_go_on_with(tmp_path: Path) -> None:
    """Without a checkpoint, it starts anew; and a folder that was only begun is not left."""
    assert resume_advice(tmp_path) == "start anew with trainer.resume=auto"
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    assert resume_advice(tmp_path) == "go on with trainer.resume=auto"


def test_a_run_that_no_disk_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_full_disk(path: Path, text: str) -> None:
        if path.name == "config.yaml":
            raise UserError(f"{path}: the disk is full")

    monkeypatch.setattr("spectrain.runs.train.write_text", fail_on_full_disk)
    facts = InputFacts("", "", data={}, inputs={})
    with pytest.raises(UserError, match="the disk is full"):
        write_settings(tmp_path / "run", RunSpec(), facts)
    assert not list(tmp_path.iterdir())


def test_python_says_the_same(tiny: Target) -> None:
    """The Python interface raises what the command line says before it exits."""
    without_recipe = spectrain.Drafter(Ngram(tiny), Chain(2), Greedy(), RunSpec(), Path("none"))
    for call, sentence in (
        (
            lambda: spectrain.train("medusa1", target="tiny", **{"trainer.lrr": 1}),
            "trainer.lrr: there is no such key",
        ),
        (
            lambda: spectrain.train("medusa1", target="tiny", **{"trainer.lr": math.nan}),
            "trainer.lr=nan: use a finite number",
        ),
        (
            lambda: spectrain.train("medusa1", target="tiny", **{"trainer.learning_rate": 1e-4}),
            "trainer.learning_rate: there is no such key; write trainer.lr",
        ),
        (
            lambda: spectrain.train("medusa1", tree=tiny),
            "tree: this is of type Target, which is no setting",
        ),
        (
            lambda: spectrain.train("medusa1", target=tiny, data=[[{"role": "user"}]]),
            r"data\[0\]: message 1",
        ),
        (lambda: spectrain.evaluate(tiny, without_recipe, prompts=[]), "prompts: there is none"),
        (lambda: spectrain.train("medusa0"), "recipe=medusa0: there is no such choice"),
        (
            lambda: spectrain.train("medusa1", data="jsonl", **{"data.path": "none.jsonl"}),
            "data.path=none.jsonl: there is no",
        ),
        (
            lambda: spectrain.generate(cast(Any, "tiny"), None, ["a"]),
            "target: this is the name 'tiny'; load it first, by spectrain.Target.from_pretrained",
        ),
        (lambda: spectrain.evaluate(tiny, cast(Any, Path("runs"))), "spectrain.Drafter.from_pre"),
        (lambda: spectrain.Drafter.from_pretrained(".", cast(Any, "tiny")), "target: this is the"),
        (lambda: spectrain.generate(tiny, None, ["\ud800"]), r"prompts\[0\]: its text holds"),
        (lambda: spectrain.generate(tiny, None, ["a"], temperature=-1), "temperature=-1"),
        (lambda: spectrain.generate(tiny, None, ["a"], max_new_tokens=0), "max_new_tokens=0"),
        (lambda: spectrain.generate(tiny, None, ["a"], batch_size=0), "batch_size=0"),
        (lambda: spectrain.generate(tiny, None, cast(Any, [["a"]])), r"prompts\[0\]: "),
        (lambda: spectrain.generate(tiny, None, ["a " * 3000]), r"prompts\[0\]: "),
        (
            lambda: spectrain.Drafter.from_pretrained(Path(__file__).parent, tiny),
            "there is no drafter in it",
        ),
        (
            lambda: spectrain.evaluate(tiny, without_recipe, name="../x"),
            "eval.name=../x: use the name",
        ),
        (
            lambda: spectrain.evaluate(tiny, without_recipe, limmit=1),
            "eval.limmit: there is no such key",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            call()
