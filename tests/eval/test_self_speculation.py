"""Drafting with the target's own layers, from the command to the report: what is written, filled
in, refused and printed.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spectrain.cli.main import dispatch_command, main
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.rejection import Block, SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.drift import own_answers, target_drift
from spectrain.eval.exits import exit_quality
from spectrain.eval.run import Evaluation
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.reference_model import generate
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain

LIMIT = 8
SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
PROMPTS = ("Name a color.", "Count: one two one two")
SHORT = [f"eval.max_new_tokens={LIMIT}", "eval.limit=2", "eval.oracle=false", "eval.repeats=1"]


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `spectrain ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["spectrain", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def read_summary(run: Path, name: str) -> dict[str, Any]:
    """A score's summary."""
    summary: dict[str, Any] = json.loads((run / "eval" / name / "summary.json").read_text())
    return summary


def read_samples(run: Path, name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / "eval" / name / "samples.jsonl").read_text().splitlines()
    ]


def rounds_of(run: Path, name: str, system: str = "drafter") -> list[tuple[Any, ...]]:
    """Every round of a system, its times left out."""
    rows = pq.read_table(run / "eval" / name / "rounds.parquet").to_pylist()
    keys = ("id", "turn", "round", "tokens", "depth", "nodes", "whole")
    return [tuple(row[key] for key in keys) for row in rows if row["system"] == system]


def write_prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def make_evaluation(folder: Path, **options: Any) -> Evaluation:
    """An evaluation over two short prompts."""
    settings: dict[str, Any] = {"baselines": (), "oracle": False, "repeats": 1, **options}
    return Evaluation(prompts=str(write_prompts(folder)), max_new_tokens=LIMIT, **settings)


# A run that trains the target


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train LayerSkip briefly, with rates high enough to change what the target says."""
    run = tmp_path_factory.mktemp("runs") / "layerskip"
    argv = sys.argv
    try:
        dispatch_command(
            [
                "train",
                "recipe=layerskip",
                "target=tiny",
                "data.limit=12",
                "data.max_length=64",
                "data.held_out=0",
                "trainer.max_steps=4",
                "trainer.lr=3e-3",
                "tree.depth=3",
                "eval.baselines=[ngram,early_exit]",
                *SHORT,
                f"run={run}",
            ]
        )
    finally:
        sys.argv = argv
    return run


def load_targets(run: Path) -> tuple[Target, Target, Any]:
    """The target as it was, as it was trained, and the original's answers to the prompts of the
    score.
    """
    before = load_tiny()
    after = load_hf(str(run / "target"))
    return (
        before,
        after,
        own_answers(
            before, [line["prompt_tokens"] for line in read_samples(run, "heldout")], LIMIT
        ),
    )


def test_a_run_judges_both_targets(trained_run: Path) -> None:
    """`exits` and `target_drift` are those of the original and of the saved target, on the
    original's own answers.
    """
    summary = read_summary(trained_run, "heldout")
    before, after, texts = load_targets(trained_run)
    for name, target in (("original", before), ("trained", after)):
        for key, values in exit_quality(target, texts).items():
            assert summary["exits"][name][key] == pytest.approx(values, rel=1e-3)
    assert (
        summary["exits"].keys() == {"original", "trained"}
        and summary["exits"]["original"] != summary["exits"]["trained"]
    )
    drift = target_drift(before, after, texts, LIMIT)
    assert {
        key: summary["target_drift"][key] for key in ("agreement", "same_answers", "checked")
    } == {key: drift[key] for key in ("agreement", "same_answers", "checked")}
    for name in ("original", "trained"):
        assert summary["target_drift"][name] == pytest.approx(drift[name], rel=1e-3)
        assert summary["exits"][name]["perplexity"][-1] == pytest.approx(
            drift[name]["perplexity"], rel=1e-3
        )
    assert (trained_run / "eval" / "heldout" / "exits.svg").exists()


def test_a_run_says_what_it_holds(trained_run: Path, tiny: Target) -> None:
    """The setting names the saved target and the exit that was chosen by default; so does the
    drafter's description.
    """
    setting = read_summary(trained_run, "heldout")["setting"]
    assert (
        setting["target_path"] == str((trained_run / "target").resolve())
        and setting["target"] == "tiny, trained"
    )
    described = json.loads((trained_run / "drafter" / "config.json").read_text())["drafter"]
    assert (
        setting["drafter"]["exit_layer"]
        == described["exit_layer"]
        == EarlyExit(tiny).exit_layer
        == tiny.num_layers // 4
    )
    assert load_file(trained_run / "drafter" / "model.safetensors") == {}


def test_the_output_is_that_of_the_saved_target(trained_run: Path, tiny: Target) -> None:
    """Every system of the run says what `generate` of RUN/target says, which is not the
    original.
    """
    summary = read_summary(trained_run, "heldout")
    assert summary["compared"].keys() == {"ngram"}
    for entry in (summary, *summary["compared"].values()):
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == 2
    own = summary["transformers"]["early_exit"]
    assert own["identical"] == own["checked"] == 2
    model = AutoModelForCausalLM.from_pretrained(trained_run / "target", dtype=torch.float32).eval()
    differ = 0
    for line in read_samples(trained_run, "heldout"):
        assert generate(model, line["prompt_tokens"], LIMIT, tiny.stop_ids) == line["output_tokens"]
        differ += (
            decode(tiny, [line["prompt_tokens"]], Greedy(), LIMIT)[0].output
            != line["output_tokens"]
        )
    assert differ


@pytest.mark.slow
def test_a_run_scored_again_by_exits(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval run=RUN eval.sweep=exit` loads the trained target: the same rounds as at the end of
    training, also in the cell of the same exit and depth, every cell identical, and exits and drift
    as before."""
    words = [
        f"run={trained_run}",
        "eval.sweep=exit",
        "eval.exits=[2,5]",
        "eval.depths=[3]",
        "eval.name=swept",
        *SHORT,
    ]
    assert run_command(monkeypatch, "eval", *words) == 0
    first = read_summary(trained_run, "heldout")
    again = read_summary(trained_run, "swept")
    assert (
        rounds_of(trained_run, "swept")
        == rounds_of(trained_run, "heldout")
        == rounds_of(trained_run, "swept", "exit-2-3")
    )
    assert [line["output_tokens"] for line in read_samples(trained_run, "swept")] == [
        line["output_tokens"] for line in read_samples(trained_run, "heldout")
    ]
    assert again["compared"].keys() == {"exit-2-3", "exit-5-3"}
    for entry in (again, *again["compared"].values()):
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == 2
    assert again["exits"] == first["exits"] and again["target_drift"] == first["target_drift"]
    for key in ("target", "target_path", "recipe", "drafter"):
        assert again["setting"][key] == first["setting"][key]


def test_a_drafter_without_its_target_is_refused(
    trained_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The drafter directory alone would draft for the untrained target: it is refused, and it
    runs with `target` next to it.
    """
    shutil.copytree(trained_run / "drafter", tmp_path / "alone" / "drafter")
    words = [
        "eval",
        f"run={tmp_path / 'alone' / 'drafter'}",
        "eval.baselines=[]",
        "eval.report=false",
        *SHORT,
        "tree.depth=3",
    ]
    assert run_command(monkeypatch, *words) == 2
    assert "keep its folder target beside it" in capsys.readouterr().err
    shutil.copytree(trained_run / "target", tmp_path / "alone" / "target")
    assert run_command(monkeypatch, *words) == 0
    assert rounds_of(tmp_path / "alone" / "drafter", "heldout") == rounds_of(trained_run, "heldout")


# transformers' own early exit


@pytest.mark.slow
@pytest.mark.parametrize("exit_layer", [None, 6])
def test_transformers_leaves_at_the_drafters_exit(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_layer: int | None
) -> None:
    """The baseline early_exit drafts from the drafter's own exit unless eval.exit_layer names one,
    and its output is that of plain generate."""
    used = set()

    def record_exit(*arguments: Any, **options: Any) -> list[int]:
        used.add(options.get("assistant_early_exit"))
        return generate(*arguments, **options)

    monkeypatch.setattr("spectrain.eval.transformers_baselines.generate", record_exit)
    evaluation = make_evaluation(tmp_path, baselines=("early_exit",), exit_layer=exit_layer)
    baselines = evaluation.score(
        Candidate(tiny, EarlyExit(tiny, 5), Chain(2), Greedy(), SETTING), tmp_path / "out"
    )["transformers"]
    assert used == {None, exit_layer or 5} and baselines.keys() == {"generate", "early_exit"}
    assert all(entry["identical"] == entry["checked"] == 2 for entry in baselines.values())


def test_other_drafters_have_no_exit_to_lend(tiny: Target, tmp_path: Path) -> None:
    """With a drafter that has no exit the baseline needs eval.exit_layer."""
    evaluation = make_evaluation(tmp_path, baselines=("early_exit",))
    with pytest.raises(UserError, match=r"early_exit needs eval\.exit_layer=N"):
        evaluation.score(
            Candidate(tiny, Ngram(tiny), Chain(2), Greedy(), SETTING), tmp_path / "out"
        )


# Skipped layers, which need no training


# Rules that weigh p against q


@pytest.mark.slow
def test_likeliest_children_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """acceptance=chain with deterministic children ends in one sentence that says what to use;
    used, it runs and is lossless by construction."""
    words = [
        "eval",
        "drafter=early_exit",
        "target=tiny",
        "tree=chain",
        "acceptance=chain",
        "eval.baselines=[]",
        f"run={tmp_path / 'run'}",
        *SHORT,
    ]
    assert run_command(monkeypatch, *words) == 2
    stderr = capsys.readouterr().err
    assert (
        stderr.startswith("spectrain: acceptance=chain: it weighs p against the q")
        and stderr.count("\n") == 1
    )
    assert "tree.children=sampled" in stderr and not (tmp_path / "run" / "eval").exists()
    assert run_command(monkeypatch, *words, "tree.children=sampled") == 0
    summary = read_summary(tmp_path / "run", "heldout")
    assert summary["lossless"]["lossless"] is None and summary["lossless"]["checked"] == 0
    assert summary["lossless"]["evidence"] == "by construction"
    assert (
        summary["setting"]["tree"]["children"] == "sampled"
        and summary["setting"]["rule"] == "chain"
    )


@pytest.mark.parametrize(
    "rule", [SpeculativeSampling(seed=3), Block(0.7, seed=3)], ids=lambda rule: rule.name
)
def test_drawn_drafts_repeat(tiny: Target, rule: Any) -> None:
    """Drawn drafts of an early exit give the same rounds in a batch as alone, and hardly ever
    what greedy decoding says.
    """
    texts = [
        tokenize_prompt(tiny.template, [{"role": "user", "content": text}]) for text in PROMPTS
    ]
    drafter = EarlyExit(tiny, 5)
    builder = Chain(3, "sampled", seed=1)
    batch = decode(tiny, texts, rule, LIMIT, drafter, builder, [4, 9])
    for text, row, batched in zip(texts, (4, 9), batch):
        (generation,) = decode(tiny, [text], rule, LIMIT, drafter, builder, [row])
        assert (generation.output, generation.round_lengths) == (
            batched.output,
            batched.round_lengths,
        )
    assert [generation.output for generation in batch] != [
        generation.output for generation in decode(tiny, texts, Greedy(), LIMIT)
    ]
