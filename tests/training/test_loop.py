"""The trainer: resumed equals uninterrupted, accumulated equals one batch, and nothing is lost
when something breaks.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectrain.data.chat import Example
from spectrain.data.dataset import Batching, Dataset
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import RunError, UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training import checkpoints
from spectrain.training.trainer import Trainer


def make_dataset(count: int = 12) -> Dataset:
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (count, 20)).tolist()
    return Dataset(
        [
            Example(row[: 20 - n % 5], [i >= 6 for i in range(20 - n % 5)])
            for n, row in enumerate(rows)
        ],
        count,
        0,
        0,
    )


def make_drafter(shallow: Target) -> Eagle3:
    torch.manual_seed(0)
    drafter = Eagle3(shallow, ttt_steps=2, vocab_size=256)
    drafter.prepare(shallow, torch.arange(shallow.head.vocab_size))
    return drafter


def make_trainer(**options: Any) -> Trainer:
    return Trainer(
        **{
            "lr": 1e-3,
            "max_steps": 9,
            "batch_tokens": 60,
            "log_every": 1,
            "save_every": 3,
            **options,
        }
    )


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Killed(Exception):
    """Stands for a kill between two steps."""


@pytest.mark.sweep(2, free=("step",))
@pytest.mark.parametrize("step", [1, 4, 6, 8])
def test_resumed_equals_uninterrupted(
    shallow: Target, tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run killed after any step and resumed prints so, ends in the same weights and losses,
    and repeats no step.
    """
    uninterrupted = make_drafter(shallow)
    make_trainer().fit(uninterrupted, shallow, make_dataset(), LiveSource(), tmp_path / "whole")

    def kill_at_step(at: int) -> None:
        if at == step:
            raise Killed

    with pytest.raises(Killed):
        make_trainer().fit(
            make_drafter(shallow),
            shallow,
            make_dataset(),
            LiveSource(),
            tmp_path / "cut",
            on_step=kill_at_step,
        )
    resumed = make_drafter(shallow)
    make_trainer().fit(resumed, shallow, make_dataset(), LiveSource(), tmp_path / "cut")
    assert (f"going on from {tmp_path / 'cut'}" in capsys.readouterr().out) == (step >= 3)
    for key, value in uninterrupted.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    expected = read_metrics(tmp_path / "whole")
    actual = read_metrics(tmp_path / "cut")
    assert [m["step"] for m in actual] == list(range(1, 10))
    assert [m["loss"] for m in expected] == [m["loss"] for m in actual]


def test_accumulation_equals_a_large_batch(shallow: Target, tmp_path: Path) -> None:
    """A step over four accumulated batches equals one over a batch of the same sequences."""
    data = make_dataset(8)
    data = Dataset(
        [Example(example.tokens[:16], example.mask[:16]) for example in data.examples], 8, 0, 0
    )
    drafters = []
    for name, options in (
        ("many", {"batch_tokens": 32, "accumulate": 4}),
        ("one", {"batch_tokens": 128}),
    ):
        drafter = make_drafter(shallow)
        (tmp_path / name).mkdir()
        make_trainer(max_steps=1, warmup=0.0, save_every=None, **options).fit(
            drafter, shallow, data, LiveSource(), tmp_path / name
        )
        drafters.append(drafter)
    for key, value in drafters[0].state_dict().items():
        # Adam's first step is the sign of the gradient, so compare what it moved by, loosely where
        # that is near zero
        assert (
            value.float() - drafters[1].state_dict()[key].float()
        ).abs().float().mean() < 1e-5, key


def test_cached_features_equal_live_features(shallow: Target, tmp_path: Path) -> None:
    """Keeping features in memory changes no loss."""
    losses = []
    for keep in (0.0, 1.0):
        run = tmp_path / str(keep)
        run.mkdir()
        make_trainer().fit(
            make_drafter(shallow), shallow, make_dataset(), LiveSource(keep_gb=keep), run
        )
        losses.append(torch.tensor([m["loss"] for m in read_metrics(run)]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


def test_full_disk_keeps_the_previous_checkpoint(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills while saving is one sentence, leaves no partial checkpoint, and the run
    resumes later.
    """
    save = checkpoints.save_tensors

    def fill_disk(tensors: Any, path: Path, *args: Any) -> Any:
        if "step-000006" in str(path) and "optimizer" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return save(tensors, path, *args)

    monkeypatch.setattr(checkpoints, "save_tensors", fill_disk)
    with pytest.raises(UserError, match=r"step-000006.*disk is full.*resume=auto"):
        make_trainer().fit(make_drafter(shallow), shallow, make_dataset(), LiveSource(), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    monkeypatch.setattr(checkpoints, "save_tensors", save)
    make_trainer().fit(make_drafter(shallow), shallow, make_dataset(), LiveSource(), tmp_path)
    assert [m["step"] for m in read_metrics(tmp_path)] == list(range(1, 10))


def test_old_checkpoints_are_dropped(shallow: Target, tmp_path: Path) -> None:
    """Only the newest `keep_checkpoints` stay."""
    make_trainer(save_every=2, keep_checkpoints=2).fit(
        make_drafter(shallow), shallow, make_dataset(), LiveSource(), tmp_path
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000006",
        "step-000008",
    ]


def test_broken_checkpoint_is_named(shallow: Target, tmp_path: Path) -> None:
    """A truncated checkpoint stops the resume with its path and the remedy."""
    make_trainer(max_steps=4).fit(
        make_drafter(shallow), shallow, make_dataset(), LiveSource(), tmp_path
    )
    weights = tmp_path / "checkpoints" / "step-000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"step-000003.*cannot be read.*delete the checkpoint"):
        make_trainer().fit(make_drafter(shallow), shallow, make_dataset(), LiveSource(), tmp_path)


class Poisoned(LiveSource):
    """Features that are NaN at some steps."""

    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self.steps = steps

    def make_batch(self, request: BatchRequest) -> Batch:
        batch = super().make_batch(request)
        assert batch.features is not None
        hidden = batch.features.hidden * (float("nan") if request.step in self.steps else 1.0)
        return replace(batch, features=replace(batch.features, hidden=hidden))


def test_a_step_that_is_not_finite_is_left_out(shallow: Target, tmp_path: Path) -> None:
    """The step changes no weights and is counted, and training continues."""
    weights_by_step: list[dict[str, torch.Tensor]] = []
    drafter = make_drafter(shallow)

    def record_weights(step: int) -> None:
        weights_by_step.append(
            {name: value.clone() for name, value in drafter.state_dict().items()}
        )

    make_trainer().fit(
        drafter, shallow, make_dataset(), Poisoned({3}), tmp_path, on_step=record_weights
    )
    assert all(
        torch.equal(value, weights_by_step[3][name]) for name, value in weights_by_step[2].items()
    )
    assert any(
        not torch.equal(value, weights_by_step[4][name])
        for name, value in weights_by_step[3].items()
    )
    assert [line["skipped"] for line in read_metrics(tmp_path)] == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert [line["step"] for line in read_metrics(tmp_path) if line["loss"] is None] == [4]


def test_many_steps_that_are_not_finite_stop(shallow: Target, tmp_path: Path) -> None:
    """After `max_skipped` of them in a row the run stops; it names the last good checkpoint,
    which holds numbers.
    """
    message = (
        r"not finite in 2 steps in a row, up to step 6; the last good checkpoint is "
        r".*step-000003; lower"
    )
    with pytest.raises(RunError, match=message):
        make_trainer(max_skipped=2).fit(
            make_drafter(shallow), shallow, make_dataset(), Poisoned({4, 5}), tmp_path
        )
    weights = load_file(tmp_path / "checkpoints" / "step-000003" / "model.safetensors")
    assert all(value.float().isfinite().all() for value in weights.values())


def test_a_training_that_learned_nothing_fails(shallow: Target, tmp_path: Path) -> None:
    """Where every step is left out, or every one of a resumed training, there is no result."""
    with pytest.raises(
        RunError, match="none of 4 steps had a finite gradient, so nothing was learned"
    ):
        make_trainer(max_steps=4).fit(
            make_drafter(shallow), shallow, make_dataset(), Poisoned({*range(4)}), tmp_path / "a"
        )

    def kill_after_step(step: int) -> None:
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        make_trainer(max_steps=6).fit(
            make_drafter(shallow),
            shallow,
            make_dataset(),
            LiveSource(),
            tmp_path / "b",
            on_step=kill_after_step,
        )
    with pytest.raises(RunError, match="none of 3 steps after step 3 had a finite gradient"):
        make_trainer(max_steps=6).fit(
            make_drafter(shallow), shallow, make_dataset(), Poisoned({*range(9)}), tmp_path / "b"
        )


@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_gradient_checkpointing_changes_no_bit(
    shallow: Target, tmp_path: Path, family: str
) -> None:
    """Modules run twice as often, and the weights are the same bit by bit."""
    results = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        drafter: Any = (
            make_drafter(shallow) if family == "eagle3" else Causal(shallow, num_layers=2)
        )
        part = drafter if family == "eagle3" else drafter.model.layers[0].mlp
        name, runs = ("run_step", 0) if family == "eagle3" else ("forward", 0)
        inner = getattr(part, name)

        def count_run(*arguments: Any, inner: Any = inner, **options: Any) -> Any:
            nonlocal runs
            runs += 1
            return inner(*arguments, **options)

        setattr(part, name, count_run)
        folder = tmp_path / f"{recomputes}"
        make_trainer(max_steps=2, gradient_checkpointing=recomputes, save_every=None).fit(
            drafter, shallow, make_dataset(), LiveSource(), folder
        )
        results.append((runs, {key: value.clone() for key, value in drafter.state_dict().items()}))
    assert results[1][0] == 2 * results[0][0] > 0
    assert all(torch.equal(value, results[1][1][key]) for key, value in results[0][1].items())


def test_learning_rate_warms_up_and_decays() -> None:
    """The rate is linear up to the peak, then half a cosine down to the minimum."""
    trainer = Trainer(lr=1.0, warmup=0.1, min_lr=0.1)
    rates = [trainer.lr_at(step, 100) for step in range(100)]
    assert (
        rates[0] == pytest.approx(0.1)
        and rates[9] == pytest.approx(1.0)
        and rates[10] == pytest.approx(1.0)
    )
    assert all(a >= b for a, b in zip(rates[10:], rates[11:])) and rates[-1] == pytest.approx(
        0.1, abs=1e-3
    )


WRONG = [("lr", 0.0), ("epochs", -1), ("max_steps", 0), ("resume", "yes"), ("accumulate", 0)]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_settings_are_named(key: str, value: Any) -> None:
    """A setting out of range is refused with its key."""
    with pytest.raises(UserError, match=f"trainer.{key}="):
        Trainer(**{key: value})


def test_what_a_training_took_adds_up(shallow: Target, tmp_path: Path) -> None:
    """Tokens are those of the batches, parameters the trained ones; a resumed run counts tokens
    before and after.
    """
    drafter = make_drafter(shallow)
    result = make_trainer().fit(drafter, shallow, make_dataset(), LiveSource(), tmp_path / "whole")
    assert (result.num_steps, result.num_parameters) == (
        9,
        sum(p.numel() for p in drafter.parameters() if p.requires_grad),
    )
    stream = make_dataset().stream_batches(Batching(60, 0))
    assert result.num_tokens == sum(
        len(example.tokens) for _ in range(9) for example in next(stream)
    )

    def kill_at_step(at: int) -> None:
        if at == 5:
            raise Killed

    with pytest.raises(Killed):
        make_trainer().fit(
            make_drafter(shallow),
            shallow,
            make_dataset(),
            LiveSource(),
            tmp_path / "cut",
            on_step=kill_at_step,
        )
    resumed = make_trainer().fit(
        make_drafter(shallow), shallow, make_dataset(), LiveSource(), tmp_path / "cut"
    )
    assert (resumed.num_steps, resumed.num_tokens) == (result.num_steps, result.num_tokens)
    assert [line["tokens"] for line in read_metrics(tmp_path / "cut")] == [
        line["tokens"] for line in read_metrics(tmp_path / "whole")
    ]


def test_a_fresh_drafter_learns_raw_text_as_in_a_plain_loop(
    shallow: Target, tmp_path: Path
) -> None:
    """Losses and weights of a new drafter are those of AdamW on the cross-entropy of every token
    but the first.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    drafter = Causal(shallow, architecture={"model_type": "llama", **sizes}, loss="cross_entropy")
    plain = copy.deepcopy(drafter.model.model)
    tokens = torch.randint(3, 2000, (4, 20), generator=torch.Generator().manual_seed(5))
    texts = Dataset([Example(row, [False] + [True] * 19) for row in tokens.tolist()], 4, 0, 0)
    make_trainer(batch_tokens=80, max_steps=3).fit(drafter, shallow, texts, LiveSource(), tmp_path)
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for line in read_metrics(tmp_path):
        optimizer.param_groups[0]["lr"] = line["lr"]
        logits = plain(tokens).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        assert line["loss"] == pytest.approx(float(loss), rel=1e-4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for actual, expected in zip(drafter.model.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
