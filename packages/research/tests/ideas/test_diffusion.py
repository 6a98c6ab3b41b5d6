"""Masked language models: PSD repeats plain decoding step by step; selectors, edits and losses
against plain versions.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain_research.diffusion.decoding import (
    MaskedDecoder,
    Policy,
    decode_soft,
    take_confident,
    take_count,
    take_final,
)
from spectrain_research.diffusion.edits import apply_edits, find_edits, refine_answer
from spectrain_research.diffusion.evaluation import DiffusionEvaluation
from spectrain_research.diffusion.model import DELETE, INSERT, KEEP, MaskedConfig, MaskedLM
from spectrain_research.diffusion.training import (
    MaskedBatch,
    collect_indications,
    edit_loss,
    masked_loss,
)

PROMPT = [1, 5, 2]


@pytest.fixture(scope="module")
def model() -> MaskedLM:
    """A random model whose confidences differ, in float64, so that a batch rounds as a row alone
    does.
    """
    torch.manual_seed(0)
    made = (
        MaskedLM(MaskedConfig(11, width=16, num_layers=2, num_heads=2, mlp_width=32))
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
        made.embedding.weight.normal_()
    return made


def decode_plainly(
    model: MaskedLM, policy: Policy, num_tokens: int, block_size: int
) -> list[list[int]]:
    """The texts of one step per forward, written out."""
    text = [*PROMPT, *[11] * num_tokens]
    texts = []
    decoder = MaskedDecoder(model, policy, block_size, reads_indicator=True)
    while 11 in text:
        with torch.inference_mode():
            (prediction,) = decoder.predict(torch.tensor([text]))
        block = (text.index(11) - len(PROMPT)) // block_size
        inside = [
            at
            for at in range(len(text))
            if text[at] == 11 and (at - len(PROMPT)) // block_size == block
        ]
        is_open = torch.tensor([at in inside for at in range(len(text))])
        chosen = policy(prediction, is_open).nonzero()[:, 0].tolist()
        assert chosen and set(chosen) <= set(inside)
        text = [
            int(prediction.tokens[at]) if at in chosen else token for at, token in enumerate(text)
        ]
        texts.append(text)
    return texts


POLICIES = {
    "one": take_count(1),
    "three": take_count(3),
    "confident": take_confident(0.3),
    "final": take_final(0.5),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_psd_repeats_plain_decoding(model: MaskedLM, policy: str, depth: int) -> None:
    """Every text after every step is that of one step per forward; with depth there are fewer
    forwards, never more.
    """
    expected = decode_plainly(model, POLICIES[policy], 14, 5)
    actual = MaskedDecoder(model, POLICIES[policy], 5, depth, reads_indicator=True).decode(
        PROMPT, 14
    )
    assert actual.states == expected and actual.tokens == expected[-1][len(PROMPT) :]
    assert (
        actual.num_steps == len(expected)
        and actual.num_forwards <= len(expected) <= actual.num_rows
    )
    assert depth > 1 or actual.num_forwards == len(expected)
    assert depth < 5 or policy != "one" or actual.num_forwards < len(expected)


def test_soft_decoding_without_its_parts_is_that_by_confidence(model: MaskedLM) -> None:
    """Hard inputs and no revision give the texts of the confident policy; with both a block
    still ends.
    """
    for threshold in (0.2, 0.4):
        plain = MaskedDecoder(model, take_confident(threshold), 5).decode(PROMPT, 10)
        hard = decode_soft(model, PROMPT, 10, 5, threshold, soft=False, revises=False)
        assert hard.tokens == plain.tokens and hard.num_forwards == plain.num_forwards
        soft = decode_soft(model, PROMPT, 10, 5, threshold)
        assert 11 not in soft.tokens and soft.num_forwards <= 20


def test_edits_are_shortest_scripts() -> None:
    """By enumeration of all pairs of short texts: passes of edits reach the target, in as many
    edits as the distance.
    """
    texts = [list(text) for size in range(4) for text in product(range(2), repeat=size)]
    for source, target in product(texts, texts):
        now = [9, *source]
        goal = [9, *target]
        total = 0
        for _ in range(6):
            edits = find_edits(now, goal)
            total += sum(edit != KEEP for edit, _ in edits)
            assert edits[0][0] in (KEEP, INSERT)
            now = apply_edits(now, edits)
        assert now == goal
        assert total == next(count for count in range(8) if reaches(source, target, count))
    assert apply_edits([1, 2, 3], [(INSERT, 7), (DELETE, 0), (KEEP, 0)]) == [1, 7, 3]


def reaches(source: list[int], target: list[int], count: int) -> bool:
    """Tell whether so many single edits lead from a text to another one, by trying all of them."""
    if source == target:
        return True
    if not count:
        return False
    options = [source[:at] + source[at + 1 :] for at in range(len(source))]
    options += [
        [*source[:at], token, *source[at + 1 :]]
        for at in range(len(source))
        for token in set(target)
    ]
    options += [
        [*source[:at], token, *source[at:]]
        for at in range(len(source) + 1)
        for token in set(target)
    ]
    return any(
        reaches(option, target, count - 1)
        for option in options
        if abs(len(option) - len(target)) < count
    )


def test_losses_by_hand(model: MaskedLM) -> None:
    """The diffusion's bound, the labels of the indicator, and an edit loss whose gradient
    reaches its heads.
    """
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    is_answer = torch.tensor([[False, False, True, True, True], [False, True, True, False, False]])
    batch = MaskedBatch(tokens, is_answer, torch.tensor([5, 3]))
    loss_value = masked_loss(model, batch, torch.Generator().manual_seed(1))
    source = torch.Generator().manual_seed(1)
    rates = torch.rand(2, generator=source).clamp(min=0.05)
    masked = is_answer & (torch.rand(2, 5, generator=source) < rates[:, None])
    total = torch.zeros((), dtype=torch.float64)
    for row, length in ((0, 5), (1, 3)):
        text = tokens[row, :length].masked_fill(masked[row, :length], 11)
        log_p = model.logits(model.run(text[None]))[0].log_softmax(-1)
        for at in masked[row].nonzero()[:, 0].tolist():
            total = total - log_p[at, tokens[row, at]] / rates[row]
    assert bool(masked.any()) and float(loss_value.detach()) == pytest.approx(
        float(total.detach()) / 5
    )
    edit_loss(model, batch, torch.Generator().manual_seed(2)).backward()
    assert model.edit_head.weight.grad is not None and bool(model.edit_head.weight.grad.any())
    model.zero_grad()
    states, logits, labels = collect_indications(
        model, [PROMPT], 6, 3, torch.Generator().manual_seed(0)
    )
    assert len(states) == len(logits) == len(labels) > 4 and labels.dtype == torch.bool
    assert masked_loss(model, batch, torch.Generator().manual_seed(1), on_policy=True) > loss_value


def test_the_evaluation_compares_all_ways(
    shallow: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A saved model is scored by its folder; PSD is exact there, and a model of another
    vocabulary is refused.
    """
    torch.manual_seed(0)
    made = MaskedLM(
        MaskedConfig(shallow.head.vocab_size, width=16, num_layers=1, num_heads=2, mlp_width=16)
    )
    made.save(tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "limit": 2, "max_new_tokens": 8, "block_size": 4}
    evaluation = DiffusionEvaluation(**settings)  # type: ignore[arg-type]
    candidate = Candidate(shallow, None, None, None, {})  # type: ignore[arg-type]
    summary = evaluation.score(candidate, tmp_path / "out")
    rows = summary["diffusion"]
    assert rows["psd"]["lossless"]["identical"] == 2 and rows["psd"]["tokens_per_forward"][0] >= 1
    assert (
        rows["one"]["tokens_per_forward"][0] == pytest.approx(1.0)
        and rows["one"]["agreement"] == 1.0
    )
    assert set(rows) > {"ni", "dmax", "me-dlm"} and "psd" in capsys.readouterr().out
    answer = refine_answer(
        made.eval(), PROMPT, MaskedDecoder(made, take_count(4), 4).decode(PROMPT, 8), 3, margin=1e9
    )
    assert answer.num_forwards == 3
    MaskedLM(MaskedConfig(7, width=16, num_layers=1, num_heads=2, mlp_width=16)).save(
        tmp_path / "other"
    )
    evaluation.model = str(tmp_path / "other")
    with pytest.raises(UserError, match="it has 7 tokens"):
        evaluation.score(candidate, tmp_path / "out")


def test_a_causal_model_is_taken_over(shallow: Target, tmp_path: Path) -> None:
    """Of one token, the states are the causal model's; states of longer texts are those of the
    token before; both are saved.
    """
    model = MaskedLM.from_causal(shallow.model).eval()
    tokens = torch.tensor([[3], [7]])
    with torch.inference_mode():
        expected = shallow.model(tokens, use_cache=False).logits
        torch.testing.assert_close(model.logits(model.run(tokens)), expected, rtol=1e-5, atol=1e-4)
    model.save(tmp_path / "model")
    text = torch.tensor([[3, 7, 1, model.mask_id]])
    saved = MaskedLM.load(tmp_path / "model")
    aligned = MaskedLM(replace(model.config, predicts_next=False)).eval()
    aligned.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert torch.equal(saved.run(text)[:, 1:], aligned.run(text)[:, :-1])
        assert torch.equal(saved.run(text), model.run(text))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 10**9}, {"num_layers": 0}, {"num_layers": True}, {"num_layers": [1]},
        {"width": "16"}, {"width": 16.0}, {"width": -1}, {"width": 1 << 17}, {"num_heads": 3},
        {"num_kv_heads": 0}, {"norm_eps": 0.5}, {"norm_eps": float("nan")}, {"vocab_size": None},
        {"predicts_next": 1}, {"more": 1},
    ],
)  # fmt: skip
def test_a_damaged_configuration_is_a_single_sentence(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    MaskedLM(MaskedConfig(7, width=16, num_layers=1, num_heads=2, mlp_width=16)).save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    # Heads that do not divide the width, and weights of another width, are named by their values.
    named = (
        "heads|its weights do not fit" if change in ({"num_heads": 3}, {"width": 1 << 17}) else ""
    )
    with pytest.raises(UserError, match=f"({named or next(iter(change))}).*; copy the f") as raised:
        MaskedLM.load(folder)
    assert "\n" not in str(raised.value)
