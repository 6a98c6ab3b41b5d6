"""Scoring: what it writes agrees with itself, and a drafter that changes the output is caught."""

import copy
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
import torch

from spectrain.config.build import GroupSpec, Layer
from spectrain.config.check import check_node
from spectrain.config.spec import RunSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match, OpenSampling
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.typical import TypicalAcceptance
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import Causal
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval import identity
from spectrain.eval.baselines import INSTALLED
from spectrain.eval.notes import explain_numbers, list_findings
from spectrain.eval.run import Evaluation, puts_chain_first
from spectrain.export.card import setting_line
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.fast import packed_linears
from spectrain.models.fast.batch_invariance import has_bfloat16
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.target import Target
from spectrain.output.verbosity import command_output
from spectrain.runs.candidate import Candidate
from spectrain.trees import Auto, Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.measurements import RuleForecast
from spectrain.trees.token_tree import TokenTree
from tests.factories import build_evaluation
from tests.installed import load_cases
from tests.models.architectures import save_small

# Cases of installed packages.
CASES = load_cases(__name__)

LIMIT = 6
SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
ROWS = [
    {"id": "two", "category": "talk", "turns": ["Name a color.", "Name another color."]},
    {"id": "count", "category": "math", "turns": ["Count: one two three one two three one two"]},
    {"id": "why", "category": "talk", "turns": ["Why is the sky blue?"]},
]
# Names that readers of summary.json rely on.
KEYS = {
    "acceptance_length": {"pooled", "ci95", "without_bonus", "per_prompt_mean"},
    "tokens_per_second": {"autoregressive", "drafted"},
    "speedup": {"ratio", "ci95", "predicted"},
    "time_share": {"draft", "verify", "accept", "other"},
    "lossless": {"rule", "checked", "identical", "near_ties"},
    "by_category": {"talk", "math"},
    "setting": {"target", "recipe", "dtype", "device", "batch_size", "tree"},
}


class WrongNgram(Ngram):
    """N-gram lookup that shifts the target's logits by one token."""

    def verify(self, context: Context, tree: TokenTree) -> Features:
        features = super().verify(context, tree)
        assert features.logits is not None
        return replace(features, logits=features.logits.roll(1, dims=-1))


def make_evaluation(
    folder: Path,
    baselines: tuple[str, ...] = (),
    check: bool | Literal["distribution"] = True,
    **more: Any,
) -> Evaluation:
    """Make an evaluation over three short prompts, one of two turns; options that only some
    tests need are off.
    """
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {"calibration_limit": 2, "oracle": False, "report": False, "repeats": 1, **more}
    return build_evaluation(
        prompts=str(path), max_new_tokens=LIMIT, baselines=baselines, check=check, **settings
    )


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_drafter_decodes_as_it_was_loaded(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the target's type as eval.drafter_dtype, rounds are those of `decode` with the loaded
    drafter. It is stated.
    """
    monkeypatch.setattr(packed_linears, "SMALL_WEIGHTS", 0)
    # What is packed here is of no use to other tests.
    target = copy.deepcopy(shallow)
    loaded = Causal(target, num_layers=1)
    summaries = {}
    for dtype in ("auto", "float32"):
        evaluation = make_evaluation(tmp_path, check=False, drafter_dtype=dtype)
        drafter = copy.deepcopy(loaded)
        # As after a training.
        packed_linears.pack_linears(drafter)
        candidate = Candidate(target, drafter, Chain(4), Greedy(), SETTING)
        summaries[dtype] = evaluation.score(candidate, tmp_path / dtype)
    rounds = [
        decode(target, [line["prompt_tokens"]], Greedy(), LIMIT, loaded, Chain(4))[0].round_lengths
        for line in read_samples(tmp_path / "float32")
    ]
    assert [line["accepted"] for line in read_samples(tmp_path / "float32")] == rounds
    assert max(max(lengths) for lengths in rounds) > 1
    packed = "int8" if packed_linears.has_int8() else "bfloat16" if has_bfloat16() else "float32"
    assert [summary["setting"]["drafter_dtype"] for summary in summaries.values()] == [
        packed,
        "float32",
    ]
    sentences = [" ".join(explain_numbers(summary)) for summary in summaries.values()]
    assert [f"weights are in {packed}" in text for text in sentences] == [
        packed != "float32",
        False,
    ]
    assert all(
        f"drafter in {each['setting']['drafter_dtype']}" in setting_line(each["setting"])
        for each in summaries.values()
    )


def test_a_drafter_computes_in_the_targets_type(shallow: Target, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="use eval.drafter_dtype=float32, or add target.dtype=bfloat16"
    ):
        make_evaluation(tmp_path, drafter_dtype="bfloat16").check_prompts(shallow)


@pytest.mark.sweep(1, free=("rule",))
@pytest.mark.parametrize(
    "rule", [Greedy(), Match(temperature=0.8, seed=2)], ids=lambda rule: rule.name
)
def test_score_writes_a_consistent_summary(
    shallow: Target, tmp_path: Path, rule: AcceptanceRule
) -> None:
    """summary.json has the documented keys, samples.jsonl agrees with it, and every output is
    identical.
    """
    eagle3 = Eagle3(shallow, vocab_size=512)
    eagle3.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    evaluation = make_evaluation(
        tmp_path, baselines=("chain", "untrained", "ngram"), report=rule.name == "greedy", repeats=2
    )
    tree = Eagle2(depth=3, budget=6, top_k=2)
    summary = evaluation.score(
        Candidate(shallow, eagle3, tree, rule, SETTING, lambda: Eagle3(shallow, vocab_size=512)),
        tmp_path / "out",
    )
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    for key, names in KEYS.items():
        assert summary[key].keys() >= names, key
    for entry in summary["by_category"].values():
        assert entry.keys() >= {"acceptance_length", "speedup"}
    assert summary["compared"].keys() == {"chain", "untrained", "ngram"}
    for entry in (summary, *summary["compared"].values()):
        lossless = entry["lossless"]
        assert lossless["rule"] == rule.name and lossless["identical"] == lossless["checked"] == 4
        assert lossless["differences"] == []
    assert not list((tmp_path / "out").glob("*.part"))

    lines = read_samples(tmp_path / "out")
    assert [(line["id"], line["turn"], line["category"]) for line in lines] == [
        ("two", 0, "talk"),
        ("two", 1, "talk"),
        ("count", 0, "math"),
        ("why", 0, "talk"),
    ]
    complete: list[int] = []
    by_prompt: dict[str, tuple[int, int]] = {}
    for line in lines:
        output = line["output_tokens"]
        accepted = line["accepted"]
        assert line["rounds"] == len(accepted) and len(output) <= LIMIT
        assert len(output) == LIMIT or output[-1] in shallow.stop_ids
        assert 1 + sum(accepted[:-1]) < len(output) <= 1 + sum(accepted) or accepted == []
        cut = len(output) < 1 + sum(accepted)
        counted = accepted[:-1] if cut else accepted
        complete += counted
        total, rounds = by_prompt.get(line["id"], (0, 0))
        by_prompt[line["id"]] = total + sum(counted), rounds + len(counted)
    pooled = summary["acceptance_length"]["pooled"]
    assert pooled == pytest.approx(sum(complete) / len(complete), abs=1e-4)
    assert summary["acceptance_length"]["without_bonus"] == pytest.approx(pooled - 1, abs=1e-4)
    # Two conversations of one turn and one of two: few prompts that are all alike say nothing of
    # others.
    interval = summary["acceptance_length"]["ci95"]
    assert (interval is None) == (len({Fraction(*sums) for sums in by_prompt.values()}) == 1)
    assert interval is None or interval[0] <= pooled <= interval[1]
    assert sum(summary["time_share"].values()) == pytest.approx(1, abs=1e-3)


def test_prompts_are_complete_contexts(shallow: Target, tmp_path: Path) -> None:
    """`prompt_tokens` of a turn is the rendered conversation, the target's own earlier answer
    included.
    """
    make_evaluation(tmp_path, check=False).score(
        Candidate(shallow, Ngram(shallow), Chain(3), Greedy(), SETTING), tmp_path / "out"
    )
    first, second, third, _ = read_samples(tmp_path / "out")
    messages = [{"role": "user", "content": ROWS[0]["turns"][0]}]
    assert first["prompt_tokens"] == tokenize_prompt(shallow.template, messages)
    answer = shallow.tokenizer.decode(
        [token for token in first["output_tokens"] if token not in shallow.stop_ids]
    )
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": ROWS[0]["turns"][1]},
    ]
    assert second["prompt_tokens"] == tokenize_prompt(shallow.template, messages)
    assert third["prompt_tokens"] == tokenize_prompt(
        shallow.template, [{"role": "user", "content": ROWS[1]["turns"][0]}]
    )


@pytest.mark.parametrize("rule", [Greedy(), Match(seed=2)], ids=lambda rule: rule.name)
def test_identity_catches_a_wrong_drafter(
    shallow: Target, tmp_path: Path, rule: AcceptanceRule
) -> None:
    """Outputs that differ from the reference are counted, with the position of each difference."""
    evaluation = make_evaluation(tmp_path)
    lossless = evaluation.score(
        Candidate(shallow, WrongNgram(shallow), Chain(3), rule, SETTING), tmp_path / "out"
    )["lossless"]
    assert lossless["checked"] == 4 and lossless["identical"] < 4
    assert len(lossless["differences"]) == 4 - lossless["identical"]
    assert lossless["lossless"] is False and lossless["declared"] is True
    for difference in lossless["differences"]:
        gap = difference["gap"]  # a sampled difference has none, and nothing excuses it
        # the prefill's token is right
        assert difference["position"] >= 1 and (gap is None or gap >= identity.NEAR_TIE)


def test_a_near_tie_goes_on_from_the_reference(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every gap is called a tie, each difference is listed and the comparison still
    reaches the end.
    """
    monkeypatch.setattr(identity, "logit_gap", lambda target, context: identity.LogitGap(0.0, 1.0))
    lossless = make_evaluation(tmp_path).score(
        Candidate(shallow, WrongNgram(shallow), Chain(3), Greedy(), SETTING), tmp_path / "out"
    )["lossless"]
    assert lossless["identical"] == lossless["checked"] == 4 and lossless["differences"] == []
    lengths = {}
    for tie in lossless["near_ties"]:
        lengths.setdefault((tie["id"], tie["turn"]), []).append(tie["position"])
    # the first token after each restart is the prefill's and right, the one after it is the
    # drafter's and wrong
    assert lengths and all(
        positions == list(range(1, 2 * len(positions), 2)) for positions in lengths.values()
    )


def test_the_gap_of_experts_is_measured_in_float64(tmp_path: Path) -> None:
    """The gap of a bfloat16 mixture of experts is that of the full model in float64, where only
    the plainest experts run.
    """
    save_small("mixtral", tmp_path)
    load_tiny().tokenizer.save_pretrained(tmp_path)
    target = load_hf(str(tmp_path), dtype="bfloat16", device="cpu")
    with torch.inference_mode():
        exact = copy.deepcopy(target).float()
        top = (
            exact.run(torch.tensor([[5, 6, 7, 8]]), ForwardPlan(logits=True))
            .logits[0, -1]
            .topk(2)
            .values
        )
    assert abs(identity.logit_gap(target, [5, 6, 7, 8]).size - float(top[0] - top[1])) < 1e-3


def test_the_target_leaves_as_it_came(shallow: Target, tmp_path: Path) -> None:
    """The plain reference run gives the target its own attention and linears back."""
    tokens = torch.tensor([[5, 6, 7, 8]])
    before = shallow.features(tokens, ("final",)).hidden
    make_evaluation(tmp_path).score(
        Candidate(shallow, Ngram(shallow), Chain(2), Greedy(), SETTING), tmp_path / "out"
    )
    assert shallow.model.config._attn_implementation == ATTENTION_NAME
    torch.testing.assert_close(shallow.features(tokens, ("final",)).hidden, before, rtol=0, atol=0)


def test_prompts_that_do_not_fit_are_left_out(shallow: Target, tmp_path: Path) -> None:
    """A prompt too long for the context with its answer is left out and counted; where none
    fits, that is a mistake.
    """
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": "long", "prompt": "word " * shallow.max_length}, {"id": "short", "prompt": "Hi"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = Evaluation(prompts=str(path))
    evaluation.check_prompts(shallow)
    assert [prompt.id for prompt in evaluation.chosen] == ["short"] and evaluation.skipped == {
        "too long": 1
    }
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match="none fits the context of shallow"):
        Evaluation(prompts=str(path)).check_prompts(shallow)


def test_a_turn_that_has_grown_too_long_is_left_out(shallow: Target, tmp_path: Path) -> None:
    """A later turn that does not fit after the answers before it is counted, and the earlier
    ones are scored.
    """
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"id": "a", "turns": ["Hi", "word " * shallow.max_length, "Bye"]}) + "\n"
    )
    evaluation = Evaluation(
        prompts=str(path), max_new_tokens=LIMIT, baselines=(), oracle=False, report=False
    )
    evaluation.check_prompts(shallow)
    summary = evaluation.score(
        Candidate(shallow, Ngram(shallow), Chain(2), Greedy(), SETTING), tmp_path / "out"
    )
    assert (
        summary["setting"]["skipped"] == {"turn too long": 2}
        and len(read_samples(tmp_path / "out")) == 1
    )


@pytest.fixture(scope="module")
def eagle3(shallow: Target) -> Eagle3:
    """An untrained drafter with a draft vocabulary of its own."""
    torch.manual_seed(1)
    drafter = Eagle3(shallow, vocab_size=512)
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    return drafter


def test_a_batch_says_what_single_prompts_say(
    shallow: Target, tmp_path: Path, eagle3: Eagle3
) -> None:
    """Batches of any size give the same samples, with ragged prompts and turns, and stay
    identical to generate.
    """
    results = []
    for batch_size in (1, 3):
        evaluation = make_evaluation(tmp_path, ("ngram",), batch_size=batch_size)
        summary = evaluation.score(
            Candidate(shallow, eagle3, Eagle2(3, 6, 2), Greedy(), SETTING),
            tmp_path / str(batch_size),
        )
        assert (
            summary["lossless"]["identical"] == 4
            and summary["compared"]["ngram"]["lossless"]["identical"] == 4
        )
        assert (summary["speedup"]["ci95"] is None) == (batch_size > 1)
        lines = read_samples(tmp_path / str(batch_size))
        results.append(
            sorted(
                (line["id"], line["turn"], line["output_tokens"], line["accepted"])
                for line in lines
            )
        )
    assert results[0] == results[1]


@pytest.mark.sweep(2, free=("rule", "builder"))
@pytest.mark.parametrize(
    "rule, builder",
    [
        (SpeculativeSampling(), Chain(2, "sampled")),
        (Block(top_k=20), Chain(3, "sampled")),
        (RecursiveRejection(0.7), Static(2, 4, [[0], [1], [0, 0]], "without_replacement")),
        (TypicalAcceptance(), Eagle2(3, 6, 2)),
        *CASES.get("test_every_rule_is_scored", ()),
    ],
    ids=lambda part: part.name,
)
def test_every_rule_is_scored(
    shallow: Target, tmp_path: Path, eagle3: Eagle3, rule: AcceptanceRule, builder: TreeBuilder
) -> None:
    """A rule that weighs p against q claims no token identity, a lossy one says so; the same run
    gives the same output.
    """
    candidate = Candidate(shallow, eagle3, builder, rule, SETTING)
    summary = make_evaluation(tmp_path, ("chain", "ngram", *INSTALLED)).score(
        candidate, tmp_path / "one"
    )
    assert summary["lossless"]["checked"] == 0 and summary["lossless"]["declared"] is rule.lossless
    assert summary["lossless"]["lossless"] is (None if rule.lossless else False)
    # nothing is drawn there: matched with the same p
    copied = summary["compared"]["ngram"]["lossless"]
    assert copied["rule"] == "match" and copied["identical"] == copied["checked"] == 4
    make_evaluation(tmp_path, check=False).score(candidate, tmp_path / "two")
    outputs = [
        [line["output_tokens"] for line in read_samples(tmp_path / name)] for name in ("one", "two")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("pays", [True, False])
def test_the_rule_that_keeps_more_is_used(
    shallow: Target,
    tmp_path: Path,
    eagle3: Eagle3,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    pays: bool,
) -> None:
    """acceptance=sample decodes by the rule that a measurement favours, prints what both would
    accept, and is scored under its name; n-gram lookup next to it is sample-and-match either way.
    """
    monkeypatch.setattr(RuleForecast, "prefers_rejection", pays)
    with command_output("notes"):
        summary = make_evaluation(tmp_path, ("ngram",)).score(
            Candidate(shallow, eagle3, Static(2, 5), OpenSampling(0.8, seed=2), SETTING),
            tmp_path / "out",
        )
    assert summary["setting"]["rule"] == "sample" and summary["lossless"]["rule"] == (
        "recursive" if pays else "match"
    )
    assert summary["rules"]["better"] == summary["lossless"]["rule"]
    assert summary["tree"]["children"] == ("without_replacement" if pays else "deterministic")
    assert summary["compared"]["ngram"]["lossless"]["identical"] == 4
    assert ("the latter was used" in " ".join(capsys.readouterr().out.split())) is pays


def test_a_tree_is_searched_and_timed_before_it_is_scored(
    shallow: Target, tmp_path: Path, eagle3: Eagle3
) -> None:
    """Builders that need it are prepared on other prompts, and the measurements are saved."""
    for builder, key in ((Static(3, 6), "hits"), (Auto(3, 8, 2), "latency")):
        summary = make_evaluation(tmp_path).score(
            Candidate(shallow, eagle3, builder, Greedy(), SETTING), tmp_path / key
        )
        assert json.loads((tmp_path / key / "calibration.json").read_text())[key]
        assert summary["lossless"]["identical"] == 4
    assert [*summary["compared"]] == ["own"] and summary["compared"]["own"]["tree"][
        "median_size"
    ] >= 2


def test_rounds_and_samples_agree(shallow: Target, tmp_path: Path, eagle3: Eagle3) -> None:
    """rounds.parquet has a row for every round of every system, and its complete rounds give the
    acceptance length.
    """
    summary = make_evaluation(tmp_path, ("ngram",)).score(
        Candidate(shallow, eagle3, Eagle2(3, 6, 2), Greedy(), SETTING), tmp_path / "out"
    )
    rows = pq.read_table(tmp_path / "out" / "rounds.parquet").to_pylist()
    drafter_rows = [row for row in rows if row["system"] == "drafter"]
    accepted = [count for line in read_samples(tmp_path / "out") for count in line["accepted"]]
    assert [row["tokens"] for row in drafter_rows] == accepted
    assert all(
        1 <= row["tokens"] <= row["depth"] + 1 and 1 <= row["nodes"] <= 6 for row in drafter_rows
    )
    for name, entry in (("drafter", summary), ("ngram", summary["compared"]["ngram"])):
        complete = [row["tokens"] for row in rows if row["system"] == name and row["whole"]]
        assert entry["acceptance_length"]["pooled"] == pytest.approx(
            sum(complete) / len(complete), abs=1e-4
        )
        assert sum(entry["tokens_by_round"]) == len(complete)


def test_what_is_right_on_the_targets_text(shallow: Target, tmp_path: Path, eagle3: Eagle3) -> None:
    """Supervision-forced agreement equals a count by hand over the target's own answers; nothing
    is forced on n-gram lookup.
    """
    evaluation = make_evaluation(tmp_path, oracle=True)
    summary = evaluation.score(
        Candidate(shallow, eagle3, Chain(1), Greedy(), SETTING), tmp_path / "out"
    )
    right = total = 0
    # depth 1: every forced round accepts its draft and adds a bonus token
    for line in read_samples(tmp_path / "out"):
        text = line["prompt_tokens"] + line["output_tokens"]
        start = len(line["prompt_tokens"])
        for root in range(start, len(text) - 1, 2):
            (generation,) = decode(shallow, [text[:root]], Greedy(), 4, eagle3, Chain(1))
            right = right + (generation.round_lengths[0] == 2)
            total = total + 1
    assert total and summary["forced"]["agreement_by_depth"] == [
        pytest.approx(right / total, abs=1e-4)
    ]
    assert summary["bounds"]["oracle"] > 0
    other = make_evaluation(tmp_path, oracle=True).score(
        Candidate(shallow, Ngram(shallow), Chain(2), Greedy(), SETTING), tmp_path / "ngram"
    )
    assert "forced" not in other and other["bounds"]["oracle"] is None


def test_baselines_of_transformers_are_shown(shallow: Target, tmp_path: Path) -> None:
    """Plain generate, prompt lookup, an assistant and early exit: one token a forward plainly,
    never fewer otherwise.
    """
    names = ("generate", "prompt_lookup", "assistant", "early_exit")
    path = tmp_path / "assistant"
    shallow.save(path)
    evaluation = make_evaluation(
        tmp_path, names, assistant=str(path), exit_layer=shallow.num_layers - 1
    )
    baselines = evaluation.score(
        Candidate(shallow, Ngram(shallow), Chain(2), Greedy(), SETTING), tmp_path / "out"
    )["transformers"]
    assert baselines.keys() == set(names)
    assert (
        baselines["generate"]["tokens_per_forward"] == 1.0
        and baselines["generate"]["speedup"] == 1.0
    )
    # the target itself assists: nearly all is right
    assert baselines["assistant"]["tokens_per_forward"] > 2
    assert all(
        entry["tokens_per_forward"] >= 1 and entry["identical"] == 4 for entry in baselines.values()
    )


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"limit": 0}, "eval.limit=0"),
        ({"max_new_tokens": 1}, "eval.max_new_tokens=1"),
        ({"baselines": ("oracle",)}, "eval.baselines: 'oracle'"),
        ({"baselines": ("assistant",)}, "eval.assistant"),
        ({"batch_size": 0}, "eval.batch_size=0"),
        ({"max_minutes": 0}, "eval.max_minutes=0"),
        ({"check_texts": 99}, "eval.check_texts=99"),
        ({"engine": "fast"}, "eval.engine=fast"),
        ({"drafter_dtype": "int8"}, "eval.drafter_dtype=int8"),
        ({"serve_in": "tensorrt"}, "eval.serve_in=tensorrt"),
        *CASES.get("test_bad_settings_are_refused", ()),
        ({"categories": ["nonsense"]}, "nonsense"),
    ],
)
def test_bad_settings_are_refused(keywords: dict[str, Any], message: str) -> None:
    """A setting that can't be met is refused under its own key, by its declaration or by the
    evaluation.
    """
    target = "spectrain.eval.default.DefaultEvaluation"
    with pytest.raises(UserError, match=message):
        checked = check_node("eval", {"_target_": target, **keywords})
        build_evaluation(**{key: value for key, value in checked.items() if key != "_target_"})


@pytest.mark.parametrize("batch_size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_engine_that_asks_nothing_scores_the_same(
    shallow: Target, tmp_path: Path, batch_size: int
) -> None:
    """eval.engine=captured changes no token and no count; what it cannot capture is decoded by the
    loop, and its label tells so."""
    eagle3 = Eagle3(shallow, vocab_size=512)
    summaries = []
    for engine in ("eager", "captured"):
        evaluation = make_evaluation(
            tmp_path, ("chain", "ngram"), oracle=True, engine=engine, batch_size=batch_size
        )
        summaries.append(
            evaluation.score(
                Candidate(shallow, eagle3, Eagle2(3, 6, 2), Greedy(), SETTING), tmp_path / engine
            )
        )
    for summary, engine in zip(summaries, ("eager", "captured")):
        assert (
            summary["engine"]
            == summary["compared"]["chain"]["engine"]
            == summary["setting"]["engine"]
            == engine
        )
        assert summary["compared"]["ngram"]["engine"] == "eager"
        assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == 4
    eager, captured = summaries
    assert (
        eager["acceptance_length"] == captured["acceptance_length"]
        and eager["acceptance_by_depth"] == captured["acceptance_by_depth"]
    )
    assert (
        "eager" not in eager["compared"]["ngram"]["label"]
        and "(eager)" in captured["compared"]["ngram"]["label"]
    )
    assert "reads values from the device" in captured["compared"]["ngram"]["eager_because"]
    assert (
        eager["bounds"]["oracle"] > 0
        and captured["bounds"]["oracle"] > 0
        and eager["forced"] == captured["forced"]
    )


def test_what_cannot_be_captured_is_refused_or_not_captured(
    shallow: Target, tmp_path: Path
) -> None:
    """eval.engine=captured names what reads values from the device; an unknown engine is refused
    with the choices.
    """
    evaluation = make_evaluation(tmp_path, engine="captured")
    with pytest.raises(
        UserError,
        match=(
            "eval.engine=captured: drafter=ngram reads values from the device.*use "
            "eval.engine=eager"
        ),
    ):
        evaluation.score(
            Candidate(shallow, Ngram(shallow), Chain(2), Greedy(), SETTING), tmp_path / "out"
        )


def test_a_chain_comes_first_unless_a_tree_that_drafts_is_requested(
    shallow: Target, tmp_path: Path
) -> None:
    """A requested tree and a sweep keep the chain of 3 from coming first; a tree that may draft
    nothing does not.
    """
    layers: list[tuple[dict[str, Layer], bool]] = [
        ({"choice": "recipe", "depth": "recipe"}, True),
        ({"choice": "command", "depth": "command"}, False),
        ({"choice": "config", "depth": "command"}, False),
    ]
    for tree_layers, measured in layers:
        tree = GroupSpec("tree", "chain", {"depth": 3}, layers=tree_layers)
        spec = RunSpec(eval=GroupSpec("eval", "default"), tree=tree)
        assert spec.with_default_tree().eval.settings.get("measured") == measured
    eagle3 = Eagle3(shallow, vocab_size=512)
    ngram = Ngram(shallow)
    for drafter, builder, settings, first in (
        (eagle3, Eagle2(3, 6), {}, True),
        (eagle3, Eagle2(3, 6), {"measured": False}, False),
        (eagle3, Auto(3, 6), {"measured": False}, True),
        (eagle3, Eagle2(3, 6), {"engine": "captured"}, True),
        (eagle3, Chain(7, "sampled"), {}, True),
        (ngram, Chain(3), {}, False),
    ):
        candidate = Candidate(shallow, drafter, builder, Greedy(), SETTING)
        assert (
            puts_chain_first(make_evaluation(tmp_path, **{"measured": True, **settings}), candidate)
            == first
        )


@pytest.mark.slow
def test_the_distribution_of_a_users_target_is_checked(
    shallow: Target, tmp_path: Path, eagle3: Eagle3
) -> None:
    """eval.check=distribution compares texts with tables where top-k leaves two tokens, and else
    with plain sampling, for every system that draws; the score says so.
    """
    for top_k, reference in ((2, "known next-token tables"), (0, "plain sampling")):
        candidate = Candidate(shallow, eagle3, Chain(3, "sampled"), Block(top_k=top_k), SETTING)
        evaluation = make_evaluation(tmp_path, ("ngram",), check="distribution", check_texts=300)
        summary = evaluation.score(candidate, tmp_path / str(top_k))
        for entry in (summary, summary["compared"]["ngram"]):
            check = entry["lossless"]["distribution"]
            assert check["verdict"] == "same" and check["reference"] == reference
            assert check["texts"] >= 300 and check["drafted_rounds"] > 0
            assert entry["lossless"]["lossless"] is True and entry["lossless"]["checked"] > 0
        assert "No difference from the target's distribution" in " ".join(
            " ".join(list_findings(summary)).split()
        )
