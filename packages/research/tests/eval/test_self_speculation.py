"""The tests of tests/eval/test_self_speculation.py that are about ideas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.layers.self_speculation import SelfDrafter
from spectrain.eval import summary as summaries
from spectrain.eval.metrics import Turn
from spectrain.models.cache_arguments import cache_argument, read_cache
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from spectrain_research.kangaroo.drafter import Kangaroo
from spectrain_research.layer_skip.drafter import LayerSkipping, search_layers
from tests.eval.test_self_speculation import (
    LIMIT,
    PROMPTS,
    SETTING,
    SHORT,
    make_evaluation,
    read_samples,
    read_summary,
    rounds_of,
    run_command,
    write_prompts,
)


@pytest.mark.slow
def test_skipped_layers_are_searched_and_can_be_given(
    tiny: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`eval drafter=layer_skip` drafts without the set that `search` finds on the calibration
    prompts, names it in the setting and on the screen, and given that set does not search and has
    the same rounds."""
    monkeypatch.setenv("SPECTRAIN_LOG", "notes")
    path = write_prompts(tmp_path)
    words = [
        "eval",
        "drafter=layer_skip",
        "target=tiny",
        "tree=chain",
        "tree.depth=3",
        "drafter.answer_tokens=8",
        "eval.baselines=[]",
        f"eval.calibration={path}",
        *SHORT,
    ]
    assert (
        run_command(monkeypatch, *words, f"run={tmp_path / 'one'}", "drafter.search_steps=9") == 0
    )
    shown = " ".join(capsys.readouterr().out.split())
    summary = read_summary(tmp_path / "one", "heldout")
    skipped = summary["setting"]["drafter"]["skipped"]
    openings = [
        tokenize_prompt(tiny.template, [{"role": "user", "content": text}]) for text in PROMPTS
    ]
    texts = [(opening, decode(tiny, [opening], Greedy(), 8)[0].output) for opening in openings]
    assert skipped == sorted(search_layers(tiny, texts, 3, 9))
    listed = str(skipped).replace(" ", "")
    assert f"Drafted without layers {skipped}; drafter.skipped={listed} uses them again." in shown
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == 2

    def fail_search(*arguments: Any) -> Any:
        raise AssertionError("a given set was searched for")

    monkeypatch.setattr("spectrain_research.layer_skip.drafter.search_layers", fail_search)
    assert (
        run_command(monkeypatch, *words, f"run={tmp_path / 'two'}", f"drafter.skipped={listed}")
        == 0
    )
    again = read_summary(tmp_path / "two", "heldout")
    assert (
        again["setting"]["drafter"]["skipped"] == skipped
        and again["acceptance_length"] == summary["acceptance_length"]
    )
    assert rounds_of(tmp_path / "two", "heldout") == rounds_of(tmp_path / "one", "heldout")


@pytest.mark.slow
@pytest.mark.sweep(1, free=("name",))
@pytest.mark.parametrize("name", ["without layers 5 and 6", "exit 6"])
def test_drafts_are_those_of_a_smaller_model(tiny: Target, tmp_path: Path, name: str) -> None:
    """The rounds are those of transformers' own model: without the layers it drafts after the full
    model's keys and values, and with all of them it verifies."""
    depth = 3
    skipped = (5, 6) if name.startswith("without") else (6, 7)
    drafter: SelfDrafter = (
        LayerSkipping(tiny, skipped) if name.startswith("without") else EarlyExit(tiny, 6)
    )
    make_evaluation(tmp_path).score(
        Candidate(tiny, drafter, Chain(depth), Greedy(), SETTING), tmp_path / "eval" / "out"
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32).eval()
    all_layers = model.model.layers
    remaining_layers = torch.nn.ModuleList(
        [layer for index, layer in enumerate(all_layers) if index not in skipped]
    )

    def forward(
        layers: torch.nn.ModuleList, tokens: list[int], cache: Any = None
    ) -> tuple[int, Any]:
        """The most likely token after `tokens`, and the cache with them."""
        model.model.layers = layers
        model.config.num_hidden_layers = len(layers)
        with torch.inference_mode():
            output = model(torch.tensor([tokens]), **{cache_argument(model): cache}, use_cache=True)
        return int(output.logits[0, -1].argmax()), read_cache(output)

    for line in read_samples(tmp_path, "out"):
        prompt = line["prompt_tokens"]
        output = line["output_tokens"]
        accepted = []
        text = [*prompt, forward(all_layers, prompt)[0]]
        while len(text) < len(prompt) + len(output):
            _, cache = forward(all_layers, text[:-1])
            drafts = list(text)
            for _ in range(depth):
                token, cache = forward(remaining_layers, drafts[-1:], cache)
                drafts.append(token)
            num_accepted = 0
            while (
                num_accepted < depth
                and forward(all_layers, drafts[: len(text) + num_accepted])[0]
                == drafts[len(text) + num_accepted]
            ):
                num_accepted += 1
            text = drafts[: len(text) + num_accepted]
            text.append(forward(all_layers, text)[0])
            accepted.append(num_accepted + 1)
        assert accepted == line["accepted"] and text[len(prompt) :][: len(output)] == output


def make_drafter(name: str, tiny: Target) -> tuple[SelfDrafter, set[int], int]:
    """A drafter, the layers of the target that it drafts with, and how many weights of its own
    it has.
    """
    if name.startswith("skip"):
        return LayerSkipping(tiny, (2, 6)), {0, 1, 3, 4, 5, 7}, 0
    if name.startswith("kangaroo"):
        drafter = Kangaroo(tiny, 3)
        return drafter, {0, 1, 2}, sum(weight.numel() for weight in drafter.state_dict().values())
    exit_layer = int(name[-1])
    return EarlyExit(tiny, exit_layer), set(range(exit_layer)), 0


@pytest.mark.sweep(4, free=("name", "depth"))
@pytest.mark.parametrize("name", ["exit 1", "exit 4", "exit 7", "skip 2 and 6", "kangaroo 3"])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_floor_of_drafting(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, name: str, depth: int
) -> None:
    """Where a forward takes as long as its weights are many, the roofline is the acceptance length
    times the whole target over a draft pass for each depth, through the layers that draft, the head
    and the drafter's own weights, and a verification."""
    drafter, layers, own = make_drafter(name, tiny)
    drafter = drafter.eval()
    text = tokenize_prompt(tiny.template, [{"role": "user", "content": PROMPTS[0]}])
    (plain,), (drafted,) = (
        decode(tiny, [text], Greedy(), LIMIT, *how) for how in ((), (drafter, Chain(depth)))
    )

    def as_many(module: torch.nn.Module, rows: float, limits: Any) -> float:
        return float(sum(weight.numel() for weight in module.parameters()))

    monkeypatch.setattr(summaries, "roofline_seconds", as_many)
    monkeypatch.setattr(summaries, "measure_limits", lambda *device: None)
    bounds = summaries.speedup_limits(tiny, drafter, [Turn("id", 0, "any", plain, drafted)], [])
    sizes = AutoModelForCausalLM.from_pretrained(tiny.path).state_dict()
    inside = {
        index: sum(
            weight.numel()
            for key, weight in sizes.items()
            if key.startswith(f"model.layers.{index}.")
        )
        for index in range(tiny.num_layers)
    }
    head = sizes["lm_head.weight"].numel()  # tied to the embedding
    target_size = sum(inside.values()) + head + sizes["model.norm.weight"].numel()
    reads = sum(inside[index] for index in layers) + head + own
    length = sum(drafted.complete_round_lengths) / len(drafted.complete_round_lengths)
    drafts = sum(drafted.depths) / len(drafted.depths)
    assert drafts == depth and bounds["roofline"] == pytest.approx(
        length * target_size / (drafts * reads + target_size), abs=1e-4
    )
