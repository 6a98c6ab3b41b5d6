"""The worked example of a family outside the package: it is as short as promised, and its
commands do what the text says.
"""

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.cli.main import dispatch_command, with_exit_codes
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import TrainingState
from spectrain.drafters.context import Context
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from spectrain.trees import Rollout, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.token_tree import TokenTree
from tests.decoding.rounds import proposed

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "new_family"
SCORE = ["eval.limit=3", "eval.max_new_tokens=24", "eval.baselines=[untrained]"]
STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def import_example() -> Any:
    """Make the example importable, as PYTHONPATH=examples/new_family does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield


def read_commands(document: str) -> list[list[str]]:
    """Return the example's commands in a document, without the program's name."""
    lines = [
        line
        for line in (ROOT / document).read_text().splitlines()
        if line.startswith("spectrain ") and "recurrent" in line
    ]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def run_command(*arguments: str) -> None:
    """Run `spectrain ARGUMENTS` in the repository's root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", sys.argv)
        dispatch_command([*arguments])


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of the shortened documented commands: trained and scored, then scored again
    with a chain.
    """
    folder = tmp_path_factory.mktemp("runs") / "recurrent-tiny"
    train, score = read_commands("docs/adding.md")
    assert train[0] == "train" and score[:4:3] == ["eval", "run=runs/recurrent-tiny"]
    run_command(*train, "data.limit=32", *SCORE, f"run={folder}")
    run_command(*score[:3], f"run={folder}", *score[4:], *SCORE)
    return folder


def test_it_fits() -> None:
    """The example is one Python file, the family's yaml and a recipe, of at most 150 lines
    together.
    """
    files = sorted(
        path for path in EXAMPLE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    assert [path.name for path in files] == ["recurrent.yaml", "recurrent.yaml", "recurrent.py"]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 150


@pytest.mark.slow
def test_the_documented_commands_train_and_score(trained_run: Path) -> None:
    """With a tree and with a chain every output is the target's, and the trained drafter gains
    more than the untrained one.
    """
    for name in ("heldout", "chain"):
        summary = json.loads((trained_run / "eval" / name / "summary.json").read_text())
        assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == 3
        untrained = summary["compared"]["untrained"]
        assert (
            summary["acceptance_length"]["pooled"] > untrained["acceptance_length"]["pooled"] >= 1
        )


@pytest.mark.parametrize(
    ("setting", "message"), [("num_stepz=3", "nearest is num_steps"), ("num_steps=0", "1 or more")]
)
def test_a_wrong_setting_is_refused(setting: str, message: str) -> None:
    """An unknown key is answered with the nearest one, a senseless value with what to write."""
    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr(
            "spectrain.cli.main.print_failure",
            lambda text, status: (messages.append(text), status)[1],
        )
        with_exit_codes(lambda words: run_command(*words))(
            [
                *read_commands("docs/adding.md")[0],
                "data.limit=4",
                "eval=none",
                f"drafter.{setting}",
            ]
        )
    assert end.value.code == 2 and message in messages[0]


class PathTracer(TreeBuilder):
    """Requests the distributions along a path in each row, and drafts nothing."""

    def __init__(self, path: Tensor) -> None:
        self.path = path  # [B, depth]

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        distributions = [rollout.start()]
        for step, tokens in enumerate(self.path.unbind(1)):
            distributions.append(
                rollout.extend(tokens[:, None], torch.full_like(tokens[:, None], step))
            )
        self.distributions = torch.cat(distributions, dim=1)  # [B, depth + 1, V]
        return TokenTree.from_chain(prefix.root[:, None])


def make_drafter(tiny: Target, **options: Any) -> Any:
    """Make the example's drafter for the tiny target, ready to train."""
    from recurrent import Recurrent

    torch.manual_seed(0)
    drafter = Recurrent(tiny, **{"num_steps": STEPS, "vocab_size": tiny.head.vocab_size, **options})
    drafter.prepare(tiny, torch.arange(tiny.head.vocab_size))
    return drafter


def test_the_loss_is_that_of_what_is_drafted(tiny: Target) -> None:
    """The loss of every unrolled step is -sum log q of the tokens at that depth, as drafting
    along them finds it.
    """
    drafter = make_drafter(tiny, loss="cross_entropy")
    torch.nn.init.normal_(drafter.out.weight, std=0.1)  # so that the cell's state matters
    tokens = torch.randint(3, 2000, (1, 14))
    features = tiny.features(tokens, drafter.layers)
    losses = drafter.loss(
        Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), features), tiny, TrainingState()
    )

    # index t, the root, and what is drafted: [rows, STEPS + 2]
    windows = tokens[0].unfold(0, STEPS + 2, 1)
    index = torch.arange(len(windows))[:, None]
    new_features = type(features)(windows[:, :1], features.layers, features.hidden[0][index])
    tracer = PathTracer(windows[:, 2:-1])
    context: Any = SimpleNamespace(
        new_features=new_features, num_new=torch.ones(len(windows)).long(), root=windows[:, 1]
    )
    context.last_state = partial(Context.last_state, context)
    proposed(drafter, context, tracer)
    drafted = tracer.distributions.gather(2, windows[:, 2:, None])[..., 0]  # [rows, STEPS]
    # shallower steps are judged further on too, where no whole window begins
    cut = tokens.shape[1] - STEPS - 2 + 1
    for step in range(STEPS):
        supervised = Batch(tokens, torch.arange(tokens.shape[1])[None] < cut + 2 + step, features)
        loss = drafter.loss(supervised, tiny, TrainingState()).terms[f"step{step}"]
        torch.testing.assert_close(
            loss, -(drafter.step_decay**step) * drafted[:, step].sum(), rtol=1e-4, atol=1e-4
        )
    assert losses.counts.tolist() == [12, 11, 10]


def test_resumed_equals_uninterrupted(tiny: Target, tmp_path: Path) -> None:
    """Training killed after four of six steps and gone on with ends in the same weights, bit by
    bit.
    """
    rows = torch.randint(3, 60, (6, 20)).tolist()
    data = Dataset([Example(row, [i >= 8 for i in range(20)]) for row in rows], 6, 0, 0)
    trainer = Trainer(lr=1e-3, max_steps=6, batch_tokens=60, save_every=2)

    def kill(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    full = make_drafter(tiny)
    cut = make_drafter(tiny)
    resumed = make_drafter(tiny)
    trainer.fit(full, tiny, data, LiveSource(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(cut, tiny, data, LiveSource(), tmp_path / "cut", on_step=kill)
    trainer.fit(resumed, tiny, data, LiveSource(), tmp_path / "cut")
    assert all(
        torch.equal(value, resumed.state_dict()[key]) for key, value in full.state_dict().items()
    )
