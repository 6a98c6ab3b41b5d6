"""Quality by exit: the logits that transformers' own hidden states have, read through the final
norm and the head.
"""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.ngram import Ngram
from spectrain.eval.drift import Text, own_answers, quality
from spectrain.eval.exits import exit_quality, plot_exits
from spectrain.eval.run import Evaluation
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain

VOCAB = 64
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Any] = {
    "llama, one layer": hf.LlamaConfig(**SIZE, num_hidden_layers=1),
    "llama, five layers": hf.LlamaConfig(**SIZE, num_hidden_layers=5),
    "gemma2, capped": hf.Gemma2Config(
        **SIZE, num_hidden_layers=3, head_dim=8, final_logit_softcapping=2.0, sliding_window=5
    ),
    "granite, scaled": hf.GraniteConfig(**SIZE, num_hidden_layers=3, logits_scaling=4.0),
}


def make_texts(vocab_size: int) -> list[Text]:
    """Prompts with answers of unequal length."""
    pairs = ((7, 3), (2, 9), (1, 1))
    return [
        tuple(torch.randint(3, vocab_size, (length,)).tolist() for length in pair) for pair in pairs
    ]  # type: ignore[misc]


def measure_reference(model: Any, cases: list[Text]) -> dict[str, list[float]]:
    """Perplexity and agreement at every exit in float64, the head as the model itself applies
    it.
    """
    count = len(model.model.layers)
    losses = [0.0] * count
    agreed = [0] * count
    judged = 0
    norm = model.model.norm
    head = model.lm_head
    cap = getattr(model.config, "final_logit_softcapping", None)
    scale = getattr(model.config, "logits_scaling", 1.0)
    for prompt, answer in cases:
        with torch.inference_mode():
            output = model(torch.tensor([prompt + answer]), output_hidden_states=True)
        for exit in range(1, count + 1):
            # the stream entering layer `exit`; the model's own logits come after the last one
            if exit < count:
                with torch.inference_mode():
                    logits = head(norm(output.hidden_states[exit])) / scale
                logits = logits if cap is None else torch.tanh(logits / cap) * cap
            else:
                logits = output.logits
            for position, token in enumerate(answer, len(prompt) - 1):
                losses[exit - 1] -= math.log(float(logits[0, position].double().softmax(-1)[token]))
                agreed[exit - 1] += int(logits[0, position].argmax()) == int(
                    output.logits[0, position].argmax()
                )
        judged += len(answer)
    return {
        "perplexity": [math.exp(loss / judged) for loss in losses],
        "agreement": [hits / judged for hits in agreed],
    }


def random_target(name: str, tiny: Target) -> tuple[Target, Any]:
    """A target with random weights, and the same model, unmodified."""
    torch.manual_seed(0)
    plain, model = (
        hf.AutoModelForCausalLM.from_config(
            MODELS[name], attn_implementation=attention, dtype=torch.float32
        ).eval()
        for attention in ("eager", "spectrain")
    )
    for parameter in plain.parameters():  # large, so that exits differ
        noise = torch.randn_like(parameter)
        parameter.data = (
            1.5 * noise * parameter.shape[-1] ** -0.5
            if noise.dim() > 1
            else parameter.data + 0.1 * noise
        )
    model.load_state_dict(plain.state_dict())
    return Target(model, tiny.tokenizer, name, ""), plain


def assert_close(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert actual["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-3)
    assert actual["agreement"] == pytest.approx(expected["agreement"], abs=1e-4)


def test_exits_of_the_tiny_target(tiny: Target) -> None:
    """Every exit's perplexity and agreement are those of transformers' hidden states, on any
    text and on its own answers.
    """
    plain = hf.AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32).eval()
    cases = [*make_texts(2000), *own_answers(tiny, [prompt for prompt, _ in make_texts(2000)], 8)]
    result = exit_quality(tiny, cases)
    assert_close(result, measure_reference(plain, cases))
    assert (
        len(result["perplexity"]) == len(result["agreement"]) == 8
        and len(set(result["perplexity"])) == 8
    )


@pytest.mark.parametrize("name", MODELS)
def test_exits_of_other_targets(tiny: Target, name: str) -> None:
    """The same holds with any number of layers and with a head that caps or scales its logits."""
    target, plain = random_target(name, tiny)
    cases = make_texts(VOCAB)
    assert_close(exit_quality(target, cases), measure_reference(plain, cases))


@pytest.mark.parametrize("name", ["tiny", *MODELS])
def test_the_last_exit_is_the_target(tiny: Target, name: str) -> None:
    """The last exit agrees with itself everywhere and has the perplexity that `quality` finds."""
    target = tiny if name == "tiny" else random_target(name, tiny)[0]
    cases = make_texts(target.head.vocab_size)
    result = exit_quality(target, cases)
    assert result["agreement"][-1] == 1.0
    assert result["perplexity"][-1] == pytest.approx(quality(target, cases)["perplexity"], rel=1e-4)


def test_an_exit_whose_last_layers_add_nothing(tiny: Target) -> None:
    """Where the layers after an exit pass their input on, that exit is as good as the last one."""
    target, _ = random_target("llama, five layers", tiny)
    with torch.no_grad():
        for layer in list(target.layers)[3:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    result = exit_quality(target, make_texts(VOCAB))
    assert (
        result["perplexity"][2:] == [result["perplexity"][-1]] * 3
        and result["agreement"][2:] == [1.0] * 3
    )
    assert result["perplexity"][1] != result["perplexity"][2]


@pytest.mark.slow
def test_a_score_of_early_exit_shows_all_exits(tiny: Target, tmp_path: Path) -> None:
    """The summary's `exits` are those of the target on its own answers, drawn in exits.svg;
    other families have none.
    """
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi.", "Why?"))
    )
    scored = Evaluation(
        prompts=str(tmp_path / "prompts.jsonl"), max_new_tokens=8, baselines=(), oracle=False
    )
    summary = scored.score(
        Candidate(
            tiny,
            EarlyExit(tiny, 3),
            Chain(2),
            Greedy(),
            {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"},
        ),
        tmp_path / "out",
    )
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    ]
    assert summary["exits"] == {
        "target": exit_quality(
            tiny, [(line["prompt_tokens"], line["output_tokens"]) for line in lines]
        )
    }
    assert (
        count_curve_points(tmp_path / "out" / "exits.svg") == [8, 8]
        and "target_drift" not in summary
    )
    other = scored.score(
        Candidate(tiny, Ngram(tiny), Chain(2), Greedy(), summary["setting"]), tmp_path / "other"
    )
    assert "exits" not in other and not (tmp_path / "other" / "exits.svg").exists()


def count_curve_points(path: Path) -> list[int]:
    """Count the points of each curve of a plot, by its markers, legends left out."""
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{svg}svg"
    axes = [group for group in root.iter(f"{svg}g") if (group.get("id") or "").startswith("axes_")]
    lines = [
        line for group in axes for line in group if (line.get("id") or "").startswith("line2d_")
    ]
    return [len(list(line.iter(f"{svg}use"))) for line in lines]


def test_the_plot_has_a_curve_of_each_kind_for_each_model(tmp_path: Path) -> None:
    """Two curves a model, perplexity and agreement, with a point at every exit, and each model's
    name in the legend.
    """
    original = {"perplexity": [9.0, 4.0, 2.0], "agreement": [0.1, 0.5, 1.0]}
    trained = {"perplexity": [7.0, 3.0], "agreement": [0.2, 1.0]}
    plot_exits(tmp_path / "exits.svg", {"original": original, "trained": trained})
    assert count_curve_points(tmp_path / "exits.svg") == [3, 2, 3, 2]
    written = (tmp_path / "exits.svg").read_text()
    assert "<!-- original -->" in written and "<!-- trained -->" in written
