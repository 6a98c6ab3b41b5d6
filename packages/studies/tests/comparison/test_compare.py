"""A comparison: its numbers are those of the runs in it, budgets are spent, and what may not be
compared is refused.
"""

import copy
import json
import math
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectrain.cli import main as cli
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.training import run as training_run
from spectrain.training import validation
from spectrain_studies.comparison.recommendations import (
    Variant,
    advise_sampling,
    compare_runs,
    ratio_interval,
    recommend,
)
from spectrain_studies.comparison.scored_runs import (
    SAME_DRAFTER,
    ScoredRun,
    check_same,
    list_differences,
    list_same_drafter,
)
from spectrain_studies.comparison.table import comparison_table, print_comparison
from tests.installed import load_cases

TOKENS = 1200
COMMON = (
    *(
        "data.limit=60",
        "data.held_out=0",
        "compare.batch=3",
        "compare.training_free=[ngram]",
        "tree=eagle2",
        "tree.depth=3",
    ),
    *("eval.limit=2", "eval.max_new_tokens=5", "eval.oracle=false", "eval.repeats=1"),
    "eval.baselines=[own,auto,copies]",
)


def with_words(words: Iterable[str], *others: str) -> list[str]:
    """Return `key=value` words, with these others instead of those of the same keys."""
    return [*{word.partition("=")[0]: word for word in (*words, *others)}.values()]


def run_compare(*words: str) -> tuple[int, str]:
    """Return the status of `spectrain compare WORDS` and what it writes to stderr."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as stderr:
        patch.setattr(sys, "argv", ["spectrain", "compare", *words])
        try:
            cli.main()
        except SystemExit as stopped:
            return int(stopped.code or 0), stderr.getvalue()
    return 0, stderr.getvalue()


@pytest.fixture(scope="module")
def comparison_folder(shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare a recipe that leaves the target alone, one that trains it and a drafter without
    training, on a budget of tokens."""
    folder = tmp_path_factory.mktemp("compare") / "all"
    recipes = (
        "recipes=medusa1,medusa2",
        "target=hf",
        f"target.model={shallow_folder}",
        f"compare.tokens={TOKENS}",
    )
    status, stderr = run_compare(*recipes, *COMMON, f"run={folder}")
    assert status == 0, stderr
    return folder


def read_comparison(folder: Path) -> dict[str, Any]:
    comparison: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return comparison


def test_rows_are_the_runs_own_numbers(comparison_folder: Path) -> None:
    """Every row says what the summary of its evaluation says, of the drafter with each of its
    trees.
    """
    rows = read_comparison(comparison_folder)["rows"]
    assert [row["name"] for row in rows] == ["medusa1", "medusa2", "ngram"]
    for row in rows:
        summary = json.loads((comparison_folder / row["evaluation"] / "summary.json").read_text())
        parts = list_same_drafter(summary).values()
        expected = {"drafter", *(name for name in SAME_DRAFTER if name in summary["compared"])}
        assert set(list_same_drafter(summary)) == expected
        assert "copies" not in expected or row["systems"][0]["label"].startswith(
            "drafter + retrieval"
        )
        for entry, part in zip(row["systems"], parts, strict=True):
            assert entry["acceptance_length"] == part["acceptance_length"]
            assert entry["speedup"] == part["speedup"]
            assert entry["lossless"] == part["lossless"]
        assert row["extra_memory"] == summary["memory"]["extra"]
        batched = json.loads(
            (comparison_folder / row["name"] / "eval" / "batch3" / "summary.json").read_text()
        )
        assert batched["setting"]["batch_size"] == row["batched"]["batch_size"] == 3


def test_everything_is_lossless_to_its_target(comparison_folder: Path) -> None:
    """Every answer is the target's; only the family that trained it is lossless to the trained
    one.
    """
    rows = {row["name"]: row for row in read_comparison(comparison_folder)["rows"]}
    assert {name: row["lossless_to"] for name, row in rows.items()} == {
        "medusa1": "target",
        "medusa2": "trained target",
        "ngram": "target",
    }
    assert all(
        entry["lossless"]["identical"] == entry["lossless"]["checked"] == 2
        for row in rows.values()
        for entry in row["systems"]
    )
    assert rows["medusa2"]["drift"]["checked"] == 2


def test_budgets_are_spent(comparison_folder: Path) -> None:
    """Each recipe saw the tokens of the budget, up to half a step, on the same data, whatever
    its own recipe says.
    """
    rows = [row for row in read_comparison(comparison_folder)["rows"] if row["trained"]]
    for row in rows:
        assert abs(row["training_tokens"] - TOKENS) < 512
        lines = [
            json.loads(line)
            for line in (comparison_folder / row["name"] / "metrics.jsonl").read_text().splitlines()
        ]
        assert row["training_tokens"] == lines[-1]["tokens"]
        assert math.isclose(row["training_seconds"], lines[-1]["seconds"], abs_tol=0.02)
    data = [
        json.loads((comparison_folder / row["name"] / "provenance.json").read_text())["data"]
        for row in rows
    ]
    assert data[0] == data[1]
    text = (comparison_folder / "report.html").read_text()
    assert all(row["name"] in text for row in rows)


@pytest.mark.slow
def test_every_run_is_validated_at_the_same_positions(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes with other data limits, families and stages hold the same conversations out, and
    the target's answers to them are the same texts in both runs.
    """
    monkeypatch.setattr(validation, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(validation, "MIN_PLACES", 8)
    recorded = []

    def record(*arguments: Any) -> Any:
        recorded.append(validation.record_held_out(*arguments))
        return recorded[-1]

    monkeypatch.setattr(training_run, "record_held_out", record)
    others = ("data.held_out=0.2", "data.limit=20", "compare.batch=null")
    words = with_words(COMMON, *others, "compare.training_free=[]")
    target = ("target=hf", f"target.model={shallow_folder}", "compare.tokens=400")
    recipes = "recipes=medusa2,dflash"
    status, stderr = run_compare(recipes, *target, *words, f"run={tmp_path / 'all'}")
    assert status == 0, stderr
    first, second = recorded
    assert len(first.texts.answers) > 1 and first.texts.answers == second.texts.answers
    places = [
        json.loads((tmp_path / "all" / name / "metrics.jsonl").read_text().splitlines()[0])[
            "held_out_at_start"
        ]["places"]
        for name in ("medusa2", "dflash")
    ]
    assert places[0] == places[1][: len(places[0])]


def test_a_comparison_goes_on(comparison_folder: Path, shallow_folder: Path) -> None:
    """The same command is refused, and with trainer.resume=auto repeats nothing but what is
    missing.
    """
    recipes = (
        "recipes=medusa1,medusa2",
        "target=hf",
        f"target.model={shallow_folder}",
        f"compare.tokens={TOKENS}",
    )
    again = (*recipes, *COMMON, f"run={comparison_folder}")
    status, stderr = run_compare(*again)
    assert status == 2 and "trainer.resume=auto" in stderr
    before = read_comparison(comparison_folder)
    saved_at = (comparison_folder / "medusa1" / "drafter" / "model.safetensors").stat().st_mtime_ns
    (comparison_folder / "ngram" / "eval" / "batch3" / "summary.json").unlink()
    status, stderr = run_compare(*again, "trainer.resume=auto")
    assert status == 0, stderr
    assert (
        comparison_folder / "medusa1" / "drafter" / "model.safetensors"
    ).stat().st_mtime_ns == saved_at
    assert (comparison_folder / "ngram" / "eval" / "batch3" / "summary.json").exists()
    assert read_comparison(comparison_folder)["rows"][:2] == before["rows"][:2]


@pytest.mark.slow
def test_finished_runs_are_joined(comparison_folder: Path, tmp_path: Path) -> None:
    """Runs that are done, named one by one or by the folder they are in, give the rows that they
    gave together.
    """
    for number, named in enumerate(
        ([comparison_folder / "medusa1", comparison_folder / "ngram"], [comparison_folder])
    ):
        status, stderr = run_compare(
            *map(str, named), f"run={tmp_path / str(number)}", "compare.batch=3"
        )
        assert status == 0, stderr
        original_rows = {row["name"]: row for row in read_comparison(comparison_folder)["rows"]}
        rows = read_comparison(tmp_path / str(number))["rows"]
        assert len(rows) == (2, 3)[number]
        for row in rows:
            assert {**row, "evaluation": ""} == {**original_rows[row["name"]], "evaluation": ""}


MISTAKES = {
    "recipes=eagle": "the nearest are peagle, eagle3",
    **load_cases("tests.eval.test_compare").get("MISTAKES", {}),
    "compare.second=4": "seconds",
    "compare.seconds=0": "more than 0",
    "drafter.rank=4": "drafter",
    "runs/not-there": "there is no such folder",
    "tree.dept=3": "depth",
    "trainer.max_steps=3": "compare.tokens",
    "trainer.max_minutes=3": "compare.seconds",
    "eval=none": "leave it out",
    "recipes=[] compare.training_free=[]": "nothing to compare",
}


@pytest.mark.sweep(4, free=("word",))
@pytest.mark.parametrize("word", MISTAKES)
def test_mistakes_are_refused(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Status 2, one sentence with what is valid, and no folder."""
    monkeypatch.setattr(
        sys,
        "argv",
        ["spectrain", "compare", *word.split(), "target=tiny", f"run={tmp_path / 'out'}"],
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    stderr = capsys.readouterr().err
    assert stopped.value.code == 2 and MISTAKES[word] in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_seconds_are_the_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of seconds is one of minutes for the trainer, by which its schedule goes too, and
    no guess at steps.
    """
    trainer_settings: list[dict[str, Any]] = []

    def record_settings(spec: RunSpec, *rest: Any) -> None:
        trainer_settings.append(dict(spec.trainer.settings))
        raise UserError("seen enough")

    monkeypatch.setattr("spectrain_studies.comparison.compare.train_and_score", record_settings)
    words = "recipes=medusa1", "target=tiny", "compare.seconds=90", *COMMON
    assert run_compare(*words, f"run={tmp_path / 'out'}")[0] == 2
    assert [
        (settings["max_minutes"], settings["max_steps"], settings["resume"])
        for settings in trainer_settings
    ] == [(1.5, None, "auto")]


def change_setting(run: ScoredRun, setting: dict[str, Any]) -> ScoredRun:
    summary = copy.deepcopy(run.summary)
    summary["setting"] |= setting
    return ScoredRun(run.name, run.folder, summary, run.facts)


def test_unlike_evaluations_are_refused(comparison_folder: Path, tmp_path: Path) -> None:
    """Another target, length, type, rule or set of prompts is refused; another machine is only
    reported.
    """
    run = ScoredRun.read("one", comparison_folder / "medusa1" / "eval" / "heldout")
    # as this machine was busy
    assert all("to be quoted" in caveat for caveat in list_differences([run, run]))
    for key, value in (
        ("target", "other"),
        ("max_new_tokens", 99),
        ("dtype", "bfloat16"),
        ("rule", "match"),
        ("batch_size", 2),
    ):
        with pytest.raises(UserError, match=f"{key} {value}"):
            check_same([run, change_setting(run, {key: value})])
    assert "devices" in " ".join(
        list_differences([run, change_setting(run, {"device": "another"})])
    )
    lines = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    lines[0]["prompt_tokens"][0] += 1
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="prompts are not those"):
        check_same([run, ScoredRun(run.name, tmp_path, run.summary, {})])


def make_variant(
    folder: Path, name: str, seconds: list[float], length: float, **row: Any
) -> Variant:
    """Make a drafter of invented speed on prompts of 10 tokens, for which decoding without it
    takes a second.
    """
    folder = folder / name
    folder.mkdir()
    rows = [
        {
            "system": "drafter",
            "id": str(number),
            "tokens": 10,
            "seconds": value,
            "autoregressive_tokens": 10,
            "autoregressive_seconds": 1.0,
        }
        for number, value in enumerate(seconds)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    ratio = len(seconds) / sum(seconds)
    entry = {
        "label": "chain of 3",
        "speedup": {"ratio": ratio, "ci95": [ratio - 0.01, ratio + 0.01], "predicted": ratio},
        "acceptance_length": {"pooled": length, "ci95": None},
    }
    facts = {
        "lossless_to": "target",
        "batched": None,
        "extra_memory": 10_000_000,
        "trained": True,
        **row,
    }
    return Variant(ScoredRun(name, folder, {}, {}), "drafter", entry, facts)


def test_advice_follows_the_numbers(tmp_path: Path) -> None:
    """The fastest is named with those that do not differ from it; memory and no training have their
    own choices; a changed target is never chosen; if nothing gains, no drafter is advised."""
    noise = [0.02 * (-1) ** number for number in range(12)]
    fast = make_variant(tmp_path, "fast", [0.5 + offset for offset in noise], 2.6)
    near = make_variant(
        tmp_path, "near", [0.505 - offset for offset in noise], 2.5, extra_memory=1_000_000
    )
    slow = make_variant(
        tmp_path, "slow", [0.8 + offset for offset in noise], 1.5, extra_memory=0, trained=False
    )
    other = make_variant(tmp_path, "other", [0.3] * 12, 3.0, lossless_to="trained target")
    advice_by_goal = {advice["goal"]: advice for advice in recommend([slow, near, other, fast])}
    assert advice_by_goal["one user"]["choice"].startswith("fast")
    assert (
        "Not significantly different on these prompts: near (chain of 3)."
        in advice_by_goal["one user"]["because"]
    )
    assert "other (chain of 3) is faster still" in advice_by_goal["one user"]["because"]
    assert advice_by_goal["little memory"]["choice"].startswith("near")
    assert advice_by_goal["no training"]["choice"].startswith("slow")
    assert "many users" not in advice_by_goal
    alone = make_variant(tmp_path, "alone", [1.2 + offset for offset in noise], 1.4)
    assert recommend([alone])[0]["choice"] == "no drafter"


def test_lossy_drafters_are_not_advised(tmp_path: Path) -> None:
    """Where the rule changes the output there is nothing to recommend."""
    lossy = make_variant(tmp_path, "lossy", [0.5] * 10, 2.0, lossless_to="nothing")
    (advice,) = recommend([lossy])
    assert advice["choice"] == "none" and "under this rule" in advice["because"]


def test_how_to_sample_is_advised(tmp_path: Path) -> None:
    """Drawn children are advised where calibration measured that they are accepted more often than
    with sample-and-match, once, and not where they are used already."""
    flat = {"match": {"forecast": 1.72}, "recursive": {"forecast": 3.17}, "better": "recursive"}
    sharp = {"match": {"forecast": 2.9}, "recursive": {"forecast": 2.91}, "better": "match"}

    def make_run(name: str, rules: dict[str, Any] | None, rule: str = "match") -> ScoredRun:
        return ScoredRun(
            name, tmp_path, {"setting": {"rule": rule}, **({"rules": rules} if rules else {})}, {}
        )

    (advice,) = advise_sampling(
        [make_run("plain", None), make_run("flat", flat), make_run("sharp", sharp)]
    )
    assert advice["choice"] == "acceptance=sample" and "flat 1.72 to 3.17" in advice["because"]
    assert "sharp" not in advice["because"]
    assert not advise_sampling([make_run("sharp", sharp)]) and not advise_sampling(
        [make_run("flat", flat, "sample")]
    )


def test_impossible_speedups_are_not_advised(tmp_path: Path) -> None:
    """A speedup above its tokens per forward does not win, and the comparison says which are not
    to be quoted.
    """
    slowed = make_variant(tmp_path, "slowed", [0.3] * 10, 1.4)
    slowed.entry["speedup"] |= {"at_most": 1.4, "quotable": False, "reason": "slowed"}
    good = make_variant(tmp_path, "good", [0.6] * 10, 2.0)
    assert recommend([slowed, good])[0]["choice"].startswith("good")


def test_no_goal_is_met_by_a_slower_drafter(tmp_path: Path) -> None:
    """A drafter that adds little memory and no speed is not advised, whatever its tokens per
    forward are.
    """
    slow = make_variant(tmp_path, "slow", [3.3] * 10, 5.5, extra_memory=500_000)
    advice = {item["goal"]: item for item in recommend([slow])}
    assert (
        advice["little memory"]["choice"] == "none"
        and "faster" in advice["little memory"]["because"]
    )
    quick = make_variant(tmp_path, "quick", [0.8] * 10, 1.5)
    choices = {item["goal"]: item["choice"] for item in recommend([slow, quick])}
    assert choices["little memory"].startswith("quick") and choices["one user"].startswith("quick")


def test_a_speedup_that_may_not_be_quoted_is_not_advised(tmp_path: Path) -> None:
    """Neither for one user nor for many: the quiet run is named, or none with the reason."""
    batched = {
        "batch_size": 3,
        "label": "chain of 3",
        "speedup": {"ratio": 1.08, "predicted": None, "quotable": True},
    }
    noisy = make_variant(tmp_path, "noisy", [0.3] * 10, 2.6, batched=batched)
    noisy.run.summary["speedup"] = {
        "ratio": 3.3,
        "quotable": False,
        "reason": "the machine was busy",
    }
    (one, length) = recommend([noisy])
    assert one == {
        "goal": "one user",
        "choice": "none",
        "because": "No speedup of them may be quoted: the machine was busy.",
    }
    assert length["goal"] == "tokens per forward" and length["choice"].startswith("noisy")
    quiet = make_variant(tmp_path, "quiet", [0.9] * 10, 1.2)
    choices = {item["goal"]: item["choice"] for item in recommend([noisy, quiet])}
    assert choices["one user"].startswith("quiet") and choices["many users"] == "none"
    assert choices["little memory"].startswith("quiet")


def test_forwards_that_draft_count(tmp_path: Path) -> None:
    """The tokens of a round that drafts with the target itself are divided by all forwards of
    the round.
    """
    doubled = make_variant(tmp_path, "two", [1.5] * 10, 2.4)
    single = make_variant(tmp_path, "one", [1.2] * 10, 1.6)
    doubled.run.summary["bounds"] = {"forwards_per_round": 2}
    assert (doubled.length, single.length) == (1.2, 1.6)
    reasons = {advice["goal"]: advice["because"] for advice in recommend([doubled, single])}
    assert "one (" in reasons["one user"] and "1.60 tokens" in reasons["one user"]


def test_engines_are_ranked_apart(tmp_path: Path) -> None:
    """A drafter in the eager loop with a slower baseline does not win over captured rounds."""
    captured = make_variant(tmp_path, "captured", [0.6] * 10, 2.0)
    captured.run.summary["engine"] = "captured"
    eager = make_variant(tmp_path, "eager", [0.3] * 10, 1.5, trained=False)
    choices = {advice["goal"]: advice["choice"] for advice in recommend([eager, captured])}
    assert choices["one user"].startswith("captured") and choices["no training"].startswith("eager")


def test_the_printed_table_is_complete(comparison_folder: Path, capsys: Any) -> None:
    """Nothing is cut off within 100 columns, columns may be left out, and odd names are shown as
    they are.
    """
    result = read_comparison(comparison_folder)
    result["rows"][0]["label"] = "medusa[/]"
    for entry in result["rows"][0]["systems"]:
        entry["acceptance_length"]["ci95"] = [10.11, 12.22]
        entry["speedup"]["ci95"] = [10.33, 13.44]
    result["rows"][0] |= {
        "trained_parameters": 1_234_567_890,
        "extra_memory": 12_345_678_900,
        "training_tokens": 123_456_000,
    }
    print_comparison(result)
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    assert max(map(len, printed.splitlines())) <= 100
    for text in ("medusa[/]", "10.11 to 12.22", "10.33 to 13.44"):
        assert text in printed
    table, _ = comparison_table(result, 200)
    cells = [cell for column in table.columns for cell in column.cells]
    assert "1234.57 M" in cells and any("123456 k" in str(cell) for cell in cells)


def test_two_speeds_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    """Where one is twice as fast on every prompt, however unlike prompts are, the interval of
    the ratio is 2 itself.
    """
    seconds = [0.1 * (1 + number % 5) for number in range(10)]
    fast = make_variant(tmp_path, "one", seconds, 2.0)
    slow = make_variant(tmp_path, "two", [2 * value for value in seconds], 2.0)
    assert ratio_interval(fast, slow) == pytest.approx([2.0, 2.0], rel=1e-3)
    assert fast.equals(slow) is False and fast.equals(fast)


def test_prompts_decoded_together_give_no_interval(tmp_path: Path) -> None:
    """Times that prompts share say nothing about their spread: no interval, and no drafter is
    called equally fast.
    """
    variants = [
        make_variant(tmp_path, name, [value] * 10, 2.0)
        for name, value in (("fast", 0.5), ("slow", 0.8))
    ]
    for variant in variants:
        variant.entry["speedup"]["ci95"] = None
    assert ratio_interval(*variants) is None and variants[0].equals(variants[1]) is None
    reason = recommend(variants)[0]["because"]
    assert "has no interval" in reason and "Not significantly different" not in reason


def test_a_joined_comparison_says_where_runs_are(comparison_folder: Path, tmp_path: Path) -> None:
    """The comparison names folders relative to its own."""
    result = compare_runs(
        [ScoredRun.read("one", comparison_folder / "medusa1" / "eval" / "heldout")], tmp_path
    )
    assert (tmp_path / result["rows"][0]["evaluation"] / "summary.json").exists()
