"""Scoring: what it writes agrees with itself, and a drafter that changes the output is caught."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decode import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval import run
from spectrain.eval.run import Evaluation, prompt_tokens
from spectrain.features import Features
from spectrain.shapes import Chain, Eagle2
from spectrain.target import ATTENTION, Target
from spectrain.tree import TokenTree

LIMIT = 12
SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
ROWS = [
    {"id": "two", "category": "talk", "turns": ["Name a color.", "Name another color."]},
    {"id": "count", "category": "math", "turns": ["Count: one two three one two three one two"]},
    {"id": "why", "category": "talk", "turns": ["Why is the sky blue?"]},
]
KEYS = {  # as DESIGN.md names them
    "acceptance_length": {"pooled", "ci95", "without_bonus", "per_prompt_mean"},
    "tokens_per_second": {"autoregressive", "drafted"},
    "speedup": {"ratio", "ci95", "predicted"},
    "time_share": {"draft", "verify", "accept", "other"},
    "lossless": {"rule", "checked", "identical", "near_ties"},
    "by_category": {"talk", "math"},
    "setting": {"target", "recipe", "dtype", "device", "batch_size", "tree"},
}


class WrongNgram(Ngram):
    """Looks tokens up, and lies about what the target says after them."""

    def verify(self, context: Context, tree: TokenTree) -> Features:
        seen = super().verify(context, tree)
        assert seen.logits is not None
        return replace(seen, logits=seen.logits.roll(1, dims=-1))


def evaluation(folder: Path, baselines: tuple[str, ...] = (), check: bool = True) -> Evaluation:
    """An evaluation over three short prompts, one of two turns."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Evaluation(prompts=str(path), max_new_tokens=LIMIT, baselines=baselines, check=check)


def samples(folder: Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rule", [Greedy(), Match(temperature=0.8, seed=2)], ids=lambda rule: rule.name)
def test_score_writes_a_consistent_summary(tiny: Target, tmp_path: Path, rule: AcceptanceRule) -> None:
    """summary.json has the documented keys, samples.jsonl agrees with it, and every output is identical."""
    eagle3 = Eagle3(tiny, vocab_size=512)
    eagle3.prepare(tiny, torch.randint(0, 1000, (tiny.head.vocab_size,)))
    scored = evaluation(tmp_path, baselines=("chain", "untrained", "ngram"))
    tree = Eagle2(depth=3, budget=6, top_k=2)
    summary = scored.score(tiny, eagle3, tree, rule, tmp_path / "out", SETTING, lambda: Eagle3(tiny, vocab_size=512))
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

    lines = samples(tmp_path / "out")
    assert [(line["id"], line["turn"], line["category"]) for line in lines] == [
        ("two", 0, "talk"), ("two", 1, "talk"), ("count", 0, "math"), ("why", 0, "talk")
    ]  # fmt: skip
    whole: list[int] = []
    for line in lines:
        output, accepted = line["output_tokens"], line["accepted"]
        assert line["rounds"] == len(accepted) and len(output) <= LIMIT
        assert len(output) == LIMIT or output[-1] in tiny.stop_ids
        assert 1 + sum(accepted[:-1]) < len(output) <= 1 + sum(accepted) or accepted == []
        cut = len(output) < 1 + sum(accepted)
        whole += accepted[:-1] if cut else accepted
    pooled = summary["acceptance_length"]["pooled"]
    assert pooled == pytest.approx(sum(whole) / len(whole), abs=1e-4)
    assert summary["acceptance_length"]["without_bonus"] == pytest.approx(pooled - 1, abs=1e-4)
    low, high = summary["acceptance_length"]["ci95"]
    assert low <= pooled <= high
    assert sum(summary["time_share"].values()) == pytest.approx(1, abs=1e-3)


def test_prompts_are_whole_contexts(tiny: Target, tmp_path: Path) -> None:
    """`prompt_tokens` of a turn is the rendered conversation, the target's own earlier answer included."""
    evaluation(tmp_path, check=False).score(tiny, Ngram(tiny), Chain(3), Greedy(), tmp_path / "out", SETTING)
    first, second, third, _ = samples(tmp_path / "out")
    messages = [{"role": "user", "content": ROWS[0]["turns"][0]}]
    assert first["prompt_tokens"] == prompt_tokens(tiny, messages)
    answer = tiny.tokenizer.decode([token for token in first["output_tokens"] if token not in tiny.stop_ids])
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": ROWS[0]["turns"][1]}]
    assert second["prompt_tokens"] == prompt_tokens(tiny, messages)
    assert third["prompt_tokens"] == prompt_tokens(tiny, [{"role": "user", "content": ROWS[1]["turns"][0]}])


@pytest.mark.parametrize("rule", [Greedy(), Match(seed=2)], ids=lambda rule: rule.name)
def test_identity_catches_a_wrong_drafter(tiny: Target, tmp_path: Path, rule: AcceptanceRule) -> None:
    """Outputs that differ from the reference are counted and placed, and the table says so."""
    scored = evaluation(tmp_path)
    lossless = scored.score(tiny, WrongNgram(tiny), Chain(3), rule, tmp_path / "out", SETTING)["lossless"]
    assert lossless["checked"] == 4 and lossless["identical"] < 4
    assert len(lossless["differences"]) == 4 - lossless["identical"]
    for difference in lossless["differences"]:
        gap = difference["gap"]  # a sampled difference has none, and nothing excuses it
        assert difference["position"] >= 1 and (gap is None or gap >= run.NEAR_TIE)  # the prefill's token is right


def test_a_near_tie_goes_on_from_the_reference(tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every gap is called a tie, each difference is listed and the comparison still reaches the end."""
    monkeypatch.setattr(run, "logit_gap", lambda target, context: 0.0)
    lossless = evaluation(tmp_path).score(tiny, WrongNgram(tiny), Chain(3), Greedy(), tmp_path / "out", SETTING)["lossless"]
    assert lossless["identical"] == lossless["checked"] == 4 and lossless["differences"] == []
    lengths = {}
    for found in lossless["near_ties"]:
        lengths.setdefault((found["id"], found["turn"]), []).append(found["position"])
    # the first token after each restart is the prefill's and right, the one after it is the drafter's and wrong
    assert lengths and all(places == list(range(1, 2 * len(places), 2)) for places in lengths.values())


def test_the_target_leaves_as_it_came(tiny: Target, tmp_path: Path) -> None:
    """The plain reference run gives the target its own attention and linears back."""
    tokens = torch.tensor([[5, 6, 7, 8]])
    before = tiny.features(tokens, ("final",)).hidden
    evaluation(tmp_path).score(tiny, Ngram(tiny), Chain(2), Greedy(), tmp_path / "out", SETTING)
    assert tiny.model.config._attn_implementation == ATTENTION
    torch.testing.assert_close(tiny.features(tokens, ("final",)).hidden, before, rtol=0, atol=0)


def test_prompts_that_do_not_fit_are_refused(tiny: Target, tmp_path: Path) -> None:
    """A prompt and an answer longer than the context stop before anything is decoded, naming the prompt."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "long", "prompt": "word " * tiny.max_length}) + "\n")
    with pytest.raises(UserError, match="prompt long has"):
        Evaluation(prompts=str(path)).check_prompts(tiny)
    evaluation(tmp_path).check_prompts(tiny)


@pytest.mark.parametrize(
    "keywords, said",
    [
        ({"limit": 0}, "eval.limit=0"),
        ({"max_new_tokens": 1}, "eval.max_new_tokens=1"),
        ({"baselines": ("oracle",)}, "eval.baselines: 'oracle'"),
    ],
)
def test_bad_settings_are_refused(keywords: dict[str, Any], said: str) -> None:
    """A setting that can't be met is refused under its own key."""
    with pytest.raises(UserError, match=said):
        Evaluation(**keywords)
