"""A judge that learns from given labels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.data.chat import tokenize_conversation
from spectrain.data.messages import parse_conversation
from spectrain.data.readers import JsonlReader
from spectrain.drafters.base import TrainingState
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain_research.lossy_rules.judge_drafter import DraftJudge
from spectrain_research.lossy_rules.labels import GivenLabels

ROWS = [
    (["How many legs has a spider?", "A spider has six legs, all long."], ["six"]),
    (["How many legs has an ant?", "An ant has six legs."], None),
    (
        ["Where do bees live?", "Bees live in hives under water."],
        ["under water", "hive"],
    ),
]


def write_rows(path: Path, rows: Any = ROWS) -> str:
    lines = []
    for (question, answer), wrong in rows:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        lines.append({"messages": messages, **({} if wrong is None else {"wrong": wrong})})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read_examples(path: str, target: Target) -> list[Any]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [
        example
        for row in rows
        for example in tokenize_conversation(
            target.template, parse_conversation({"messages": row["messages"]}, "row")
        )
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_wrong_pieces_are_wrong_tokens(shallow: Target, tmp_path: Path, packed: bool) -> None:
    """The judged tokens are those of the answers, each with the target's own state; the wrong ones,
    decoded, hold the marked pieces and hardly more.
    """
    path = write_rows(tmp_path / "labelled.jsonl")
    judge = DraftJudge(shallow, labels=path)
    judge.prepare(shallow, torch.zeros(1))
    assert judge.given is not None
    examples = read_examples(path, shallow)
    batch = LiveSource().make_batch(BatchRequest(examples, shallow, ("final",), packed))
    states, is_right, weights = judge.judge_given(batch, judge.given)
    row = 0
    for example, (_, wrong) in zip(examples, ROWS, strict=True):
        tokens = torch.tensor([example.tokens])
        final = shallow.features(tokens, ("final",)).at_layer("final")[0]
        judged = [
            index
            for index in range(len(example.tokens) - 1)
            if example.mask[index] and example.mask[index + 1]
        ]
        labels = is_right[row : row + len(judged)].tolist()
        torch.testing.assert_close(
            states[row : row + len(judged)], final[judged], atol=1e-4, rtol=1e-3
        )
        marked = [example.tokens[index] for index, right in zip(judged, labels) if not right]
        text = shallow.tokenizer.decode(marked)
        assert all(piece in text for piece in wrong or []) and (wrong is None) == (not marked)
        assert len(text) <= sum(map(len, wrong or [])) + 4 * len(wrong or [])
        row += len(judged)
    assert row == len(states) == len(weights)


def test_given_labels_are_not_called_unused(shallow: Target, tmp_path: Path) -> None:
    """The data reads no column of labels, and the judge does where it has them."""
    path = write_rows(tmp_path / "labelled.jsonl")
    dataset = JsonlReader(path).make_dataset(shallow.template)
    with_labels = DraftJudge(shallow, labels=path)
    without = DraftJudge(shallow)
    for judge in (with_labels, without):
        judge.prepare(shallow, torch.zeros(1))
    assert dataset.unread_lines(with_labels.capabilities.row_keys) == []
    assert dataset.unread_lines(without.capabilities.row_keys) == [
        "not used: 2 x key 'wrong' of a row"
    ]


def test_the_probe_learns_given_labels(shallow: Target, tmp_path: Path) -> None:
    """Some steps on the labels lower the loss, with gradients in the probe alone."""
    path = write_rows(tmp_path / "labelled.jsonl")
    judge = DraftJudge(shallow, labels=path)
    judge.prepare(shallow, torch.zeros(1))
    batch = LiveSource().make_batch(BatchRequest(read_examples(path, shallow), shallow, ("final",)))
    optimizer = torch.optim.Adam(judge.probe.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        total = judge.loss(batch, shallow, TrainingState()).total
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(["What?", "That."], ["this"])], "not in the last answer"),
        ([(["What?", "That."], "That")], "no list of texts"),
        ([(["What?", "That."], None)], "no row has a wrong piece"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(
    shallow: Target, tmp_path: Path, rows: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        GivenLabels(write_rows(tmp_path / "labelled.jsonl", rows), shallow)


def test_other_training_texts_are_refused(shallow: Target, tmp_path: Path) -> None:
    given = GivenLabels(write_rows(tmp_path / "labelled.jsonl"), shallow)
    with pytest.raises(UserError, match="is not in it; train on the same file"):
        given.find(torch.tensor([3, 4, 5]), torch.tensor([0, 1, 1]))
