"""Learning while decoding: the training examples, the copy that does not learn, and an output
that stays the target's.
"""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrain.cli.main import dispatch_command
from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.base import TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.ngram import Ngram
from spectrain.errors import RunError, UserError
from spectrain.eval.metrics import Turn
from spectrain.eval.pipeline import run_pipeline
from spectrain.eval.run import EngineAnswers
from spectrain.features.batch import collate
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain_research.online.evaluation import Learner, Online, acceptance_curve, make_example
from spectrain_research.online.signals import MIN_KL_WEIGHT, DviSignals
from spectrain_research.shared.draft_replay import DraftRecorder, collate_replays, select_replays
from spectrain_research.shared.guard import Guard
from tests.factories import build_evaluation

LIMIT = 14
SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
QUESTIONS = [
    ["Name a color.", "Name another color."],
    ["Count: one two three one two three one two"],
    ["Why is the sky blue?"],
    ["Say hello."],
]
ROWS = [
    {"id": f"{number}", "category": "talk", "turns": turns}
    for number, turns in enumerate(QUESTIONS)
]
NUM_TURNS = 5
# without what these tests do not check
QUICK: dict[str, Any] = {"oracle": False, "report": False, "repeats": 1}
LEARN = pytest.mark.parametrize("learn", ["corrections", "answers", "split", "dvi"])
Weights = dict[str, Tensor]


def make_drafter(shallow: Target) -> Causal:
    return Causal(shallow, num_layers=2)


def copy_weights(drafter: torch.nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def are_equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[name]) for name, tensor in left.items()
    )


# The training examples


@pytest.mark.parametrize(
    ("output", "accepted", "depths", "corrected"),
    [
        # a round that drafted nothing corrects nothing
        ([10, 11, 12, 13, 14, 15], [3, 1, 1], [3, 2, 0], [5, 6]),
        # the bonus token after a correct draft is no correction
        ([10, 11, 12, 13, 14, 15], [4, 1], [3, 3], [7]),
        ([10, 11], [3], [3], []),  # cut before its correction
        ([10, 11, 12, 13], [3], [3], [5]),  # cut right after it
        ([10, 11, 2], [1, 3], [3, 3], [3]),  # EOS is an accepted draft
        ([10, 2], [1], [3], [3]),  # EOS is a correction
        ([2], [], [], []),
    ],
)
def test_corrections_by_hand(
    output: list[int], accepted: list[int], depths: list[int], corrected: list[int]
) -> None:
    """Exactly the tokens that replaced a wrong draft carry loss; without `corrections` the whole
    answer does.
    """
    generation = Generation([1, 2], output, accepted, depths)
    tokens = [1, 2, *output]
    expected = Example(tokens, [position in corrected for position in range(len(tokens))])
    assert make_example(generation, corrections=True) == expected
    assert make_example(generation, corrections=False) == Example(
        tokens, [False] * 2 + [True] * len(output)
    )


def record_answers(shallow: Target, drafter: Causal, count: int) -> list[tuple[Generation, Any]]:
    """Decode answers one by one and return each with its recorded rounds."""
    answers = []
    for number in range(count):
        recorder = DraftRecorder(Chain(3))
        torch.manual_seed(number)
        (generation,) = decode(
            shallow, [torch.randint(3, 2000, (6,)).tolist()], Greedy(), LIMIT, drafter, recorder
        )
        answers.append((generation, recorder.rounds[0]))
    return answers


ACCEPTED_DRAFT = [1, 0]  # what the target predicts


@pytest.mark.parametrize("updates", [0, 6, 40])
def test_the_loss_of_dvi_has_the_enumerated_gradient(updates: int) -> None:
    """Over every draft of two tokens that may be drawn, the terms have the gradient of lambda_kl
    KL(p || q) at logged positions, less 2 lambda_pg times the chance that a logged position is
    accepted; the baseline has none. Weights fall and rise."""
    # at the root, and after a 0 and a 1
    logits = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    log_p = torch.randn(3, 2, dtype=torch.float64).log_softmax(-1)
    log_q = logits.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    signals = DviSignals(updates, 0.3)
    estimated = torch.zeros_like(logits)
    expected = torch.zeros((), dtype=torch.float64)
    for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
        nodes = [0, 1 + first]
        tokens = [first, second]
        accepted = 0 if first != ACCEPTED_DRAFT[0] else 1 + (second == ACCEPTED_DRAFT[1])
        generation = Generation([5], [7] * (2 + accepted), [accepted + 1], [2])
        (window,) = signals.select_windows(generation, [(tokens, accepted + 1)], 4, Random(0))
        batch = replace(signals, mean_reward=0.3).collate([window])
        assert (
            batch.advantage is not None
            and batch.weight is not None
            and batch.num_supervised == min(accepted + 1, 2)
        )
        gains = batch.advantage[batch.loss_mask].tolist()
        weights_of_kl = batch.weight[batch.loss_mask].tolist()
        chance = (log_q[0, first] + log_q[nodes[1], second]).detach().exp()
        loss = torch.zeros((), dtype=torch.float64)
        for node, token, gain, weight in zip(nodes, tokens, gains, weights_of_kl):
            loss = loss + weight * divergence[node] - gain * log_q[node, token]
        estimated += chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    reached = log_q[0, ACCEPTED_DRAFT[0]].detach().exp()
    for node, right, logged in (
        (0, ACCEPTED_DRAFT[0], 1.0),
        (1 + ACCEPTED_DRAFT[0], ACCEPTED_DRAFT[1], reached),
    ):
        expected = expected + logged * (
            signals.kl_weight * divergence[node]
            - 2 * signals.policy_weight * log_q[node, right].exp()
        )
    torch.testing.assert_close(
        estimated, torch.autograd.grad(expected, logits)[0], rtol=1e-5, atol=1e-6
    )
    assert (
        DviSignals(0).kl_weight == 1.0
        and DviSignals(0).policy_weight == 0.0
        and DviSignals(99).kl_weight == MIN_KL_WEIGHT
    )


def test_corrections_are_what_the_drafter_got_wrong(shallow: Target) -> None:
    """In a real answer a token is marked exactly where, by the record, a draft ended before it."""
    marked = 0
    for generation, rounds in record_answers(shallow, make_drafter(shallow), 6):
        expected = [False] * (len(generation.prompt) + len(generation.output) + 4)
        end = len(generation.prompt) + 1
        for drafted, count in rounds:
            end += count
            expected[end - 1] = count <= len(drafted)
        example = make_example(generation, corrections=True)
        assert example.mask == expected[: len(example.tokens)]
        marked += sum(example.mask)
    assert marked > 5


def make_learner(
    shallow: Target, drafter: Causal, every: int, learn: Any, saved: list[Weights]
) -> Learner:
    return Learner(
        drafter, shallow, 1e-3, every, learn, lambda learned: saved.append(copy_weights(learned))
    )


def show_answers(online: Learner, parts: list[list[tuple[Generation, Any]]]) -> None:
    """Show answers, some at a time."""
    recorder = DraftRecorder(Chain(3))
    for part in parts:
        recorder.rounds = [rounds for _, rounds in part]
        online.read_answers([generation for generation, _ in part], recorder)
        assert recorder.rounds == []


@LEARN
def test_an_update_after_every_so_many_answers(shallow: Target, learn: Any) -> None:
    """Weights change and are saved at every `every`-th answer and nowhere else; the drafter is
    left as it decodes.
    """
    drafter = Causal(shallow, num_layers=1).eval()
    saved = list[Weights]()
    online = make_learner(shallow, drafter, 2, learn, saved)
    for number, answer in enumerate(record_answers(shallow, drafter, 5), 1):
        before = copy_weights(drafter)
        show_answers(online, [[answer]])
        assert are_equal(before, copy_weights(drafter)) == bool(number % 2)
        assert online.updates == len(saved) == number // 2 and not drafter.training
        assert all(parameter.grad is None for parameter in drafter.parameters())
    assert are_equal(saved[-1], copy_weights(drafter)) and online.seconds > 0
    assert (
        online.summary().keys() == {"updates", "every", "learn", "seconds"}
        and online.summary()["updates"] == 2
    )


@LEARN
def test_an_update_is_a_clipped_step_on_the_mean_loss(
    shallow: Target, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is clipped is the gradient of all waiting answers' loss over their supervised tokens, in
    one batch by hand; what is stepped with is the clipped one."""
    drafter = Causal(shallow, num_layers=1).eval()
    count = 6
    other = copy.deepcopy(drafter)
    answers = record_answers(shallow, drafter, count)
    online = make_learner(shallow, drafter, count, learn, [])
    gradients: list[list[Tensor]] = []

    def record_gradients() -> None:
        gradients.append([master.grad.clone() for master in online.masters])

    clip = torch.nn.utils.clip_grad_norm_
    step = online.optimizer.step
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grad_norm_",
        lambda parameters, norm: (record_gradients(), clip(parameters, norm)),
    )
    monkeypatch.setattr(online.optimizer, "step", lambda: (record_gradients(), step()))
    show_answers(online, [answers[:2], answers[2:]])
    if learn == "split":
        random = Random(0)
        batch = collate_replays(
            [
                replay
                for generation, rounds in answers
                for replay in select_replays(generation, rounds, 4, random)
            ]
        )
    elif learn == "dvi":  # the first update takes the divergence alone
        random = Random(0)
        signals = DviSignals()
        batch = signals.collate(
            [
                window
                for generation, rounds in answers
                for window in signals.select_windows(generation, rounds, 4, random)
            ]
        )
    else:
        batch = collate(
            [make_example(generation, learn == "corrections") for generation, _ in answers]
        )
    assert len(batch.tokens) > 4  # more than are taken at once
    batch = replace(batch, features=shallow.features(batch.tokens, ("final",)))
    (other.train().loss(batch, shallow, TrainingState()).total / batch.num_supervised).backward()
    for clipped in (False, True):
        if clipped:
            clip(other.parameters(), 0.5)
        for parameter, gradient in zip(other.parameters(), gradients[clipped], strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


def test_nothing_wrong_nothing_learnt(shallow: Target) -> None:
    """Answers without a correction leave the weights as they are."""
    drafter = make_drafter(shallow).eval()
    before = copy_weights(drafter)
    online = make_learner(shallow, drafter, 1, "corrections", [])
    show_answers(online, [[(Generation([1, 2], [10, 11, 12, 13], [3], [2]), [([11, 12], 3)])]])
    assert online.updates == 1 and are_equal(before, copy_weights(drafter))


def test_a_loss_that_is_not_finite_stops(shallow: Target) -> None:
    """Nothing is stepped on a NaN, and the setting to lower is named."""
    drafter = make_drafter(shallow).eval()
    answers = record_answers(shallow, drafter, 1)
    with torch.no_grad():
        drafter.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(RunError, match=r"loss is not finite at update 1; lower eval\.online_lr"):
        show_answers(make_learner(shallow, drafter, 1, "answers", []), [answers])


def test_the_curve_is_a_moving_mean_over_rounds() -> None:
    """At every turn the curve is the mean over the complete rounds of the last `window` turns,
    or 1 where there is none.
    """
    turns = [
        Turn("a", 0, "talk", Generation([1]), Generation([1], [2], rounds, is_cut=cut))
        for rounds, cut in (([4], True), ([2, 4], False), ([1], False), ([3, 3, 9], True))
    ]
    assert acceptance_curve(turns, 2) == [1.0, 3.0, round(7 / 3, 4), round(7 / 3, 4)]
    assert acceptance_curve(turns, 1) == [1.0, 3.0, 1.0, 3.0] and acceptance_curve([], 3) == []


# An evaluation


def test_learning_starts_from_the_weights_as_saved(shallow_folder: Path, tmp_path: Path) -> None:
    """A bf16 target's drafter decodes in bf16, but what is stepped, and saved, are the float32
    weights it was loaded with.
    """
    target = load_hf(str(shallow_folder), dtype="bfloat16")
    drafter = Causal(target, num_layers=1)
    saved = list[Weights]()
    drafter.float()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    before = copy_weights(drafter)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    evaluation = build_evaluation(
        prompts=str(tmp_path / "prompts.jsonl"), online=True, baselines=()
    )
    candidate = Candidate(
        target,
        drafter,
        Chain(3),
        Greedy(),
        SETTING,
        save_learned=lambda learned: saved.append(copy_weights(learned)),
    )
    (online, *_) = parts = evaluation.extensions()
    assert isinstance(online, Online)
    engine = EngineAnswers(evaluation, candidate, tmp_path)
    engine.views = parts
    engine.prepare()
    names = [name for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    rounded = copy_weights(drafter)
    assert rounded[names[0]].dtype == torch.bfloat16 and not torch.equal(
        rounded[names[0]].float(), before[names[0]]
    )
    assert all(
        torch.equal(master, before[name])
        for name, master in zip(names, online.learner.masters, strict=True)
    )
    online.learner._save_drafter()
    assert are_equal(
        {name: saved[0][name] for name in names}, {name: before[name] for name in names}
    )
    assert are_equal(copy_weights(drafter), rounded)


def score_learning(
    shallow: Target, folder: Path, builder: TreeBuilder, saved: list[Weights], **options: Any
) -> tuple[Any, Any, Causal]:
    """The summary, the copy that does not learn and the drafter of one evaluation."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    evaluation = build_evaluation(
        prompts=str(folder / "prompts.jsonl"),
        max_new_tokens=LIMIT,
        baselines=(),
        **{**QUICK, **options},
    )
    drafter = make_drafter(shallow)
    candidate = Candidate(
        shallow,
        drafter,
        builder,
        Greedy(),
        SETTING,
        save_learned=lambda learned: saved.append(copy_weights(learned)),
    )
    engine = EngineAnswers(evaluation, candidate, folder / "out")
    summary = run_pipeline(evaluation, engine, folder / "out")
    return summary, engine.decoding.systems[-1].drafter, drafter


def rounds_of(folder: Path, system: str) -> list[tuple[Any, ...]]:
    """Every round of a system, its times left out."""
    rows = pq.read_table(folder / "out" / "rounds.parquet").to_pylist()
    keys = ("id", "turn", "round", "tokens", "depth", "nodes", "whole")
    return [tuple(row[key] for key in keys) for row in rows if row["system"] == system]


@pytest.fixture(scope="module")
def without_learning(
    shallow: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Causal]:
    """An evaluation in which nothing is learnt: its folder, its summary and its drafter."""
    folder = tmp_path_factory.mktemp("plain")
    summary, _, drafter = score_learning(shallow, folder, Chain(3), [])
    return folder, summary, drafter


@pytest.mark.sweep(1, free=("learn",))
@LEARN
def test_only_the_learner_changes(
    shallow: Target, without_learning: tuple[Path, Any, Causal], tmp_path: Path, learn: Any
) -> None:
    """The copy decodes as without learning and keeps its weights; the learner changes; both
    outputs are generate's.
    """
    folder, plain, untouched = without_learning
    folders = [folder, tmp_path]
    saved = list[Weights]()
    options = {"online": True, "online_every": 2, "online_lr": 1e-3, "online_learn": learn}
    summary, still, drafter = score_learning(shallow, folders[1], Chain(3), saved, **options)
    assert (
        still is not drafter
        and are_equal(copy_weights(untouched), copy_weights(still))
        and are_equal(copy_weights(untouched), copy_weights(make_drafter(shallow)))
    )
    assert rounds_of(folders[1], "static_drafter") == rounds_of(folders[0], "drafter")
    assert summary["compared"]["static_drafter"]["tokens_by_round"] == plain["tokens_by_round"]
    first = {("0", 0), ("0", 1)}  # what was decoded before the first update
    assert [row for row in rounds_of(folders[1], "drafter") if row[:2] in first] == [
        row for row in rounds_of(folders[0], "drafter") if row[:2] in first
    ]
    assert (
        len(saved) == 2
        and are_equal(saved[-1], copy_weights(drafter))
        and not are_equal(saved[-1], copy_weights(still))
    )
    assert not are_equal(saved[0], saved[1]) and not drafter.training
    for entry in (summary, summary["compared"]["static_drafter"]):
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == NUM_TURNS
    outputs = [
        [
            json.loads(line)["output_tokens"]
            for line in (folder / "out" / "samples.jsonl").read_text().splitlines()
        ]
        for folder in folders
    ]
    assert outputs[0] == outputs[1]
    learning = summary["online"]
    assert learning["updates"] == 2 and learning["every"] == 2 and learning["learn"] == learn
    assert {name: len(values) for name, values in learning["curves"].items()} == {
        "drafter": NUM_TURNS,
        "static_drafter": NUM_TURNS,
    }
    assert learning["curves"]["drafter"][0] == learning["curves"]["static_drafter"][0]
    assert (folders[1] / "out" / "online.svg").read_text().lstrip().startswith("<?xml")
    assert "online" not in plain and not (folders[0] / "out" / "online.svg").exists()
    assert json.loads((folders[1] / "out" / "summary.json").read_text()) == summary


@pytest.mark.sweep(1, free=("learn",))
@pytest.mark.parametrize("learn", ["corrections", "answers"])
def test_trees_and_batches_learn_too(shallow: Target, tmp_path: Path, learn: Any) -> None:
    """With a branching tree and prompts decoded together, the output is still the target's and
    the learner learns.
    """
    options = {
        "online": True,
        "online_every": 1,
        "online_lr": 1e-3,
        "online_learn": learn,
        "batch_size": 2,
    }
    summary, still, drafter = score_learning(shallow, tmp_path, Eagle2(3, 6, 2), [], **options)
    assert not are_equal(copy_weights(still), copy_weights(drafter))
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == NUM_TURNS
    assert (
        summary["tree"]["name"] == summary["compared"]["static_drafter"]["tree"]["name"] == "eagle2"
    )


def test_replays_want_chains(shallow: Target, tmp_path: Path) -> None:
    """Draft-OPD replays one path: with a tree that branches, learning so is refused before
    anything is decoded.
    """
    with pytest.raises(UserError, match=r"eval\.online_learn"):
        score_learning(shallow, tmp_path, Eagle2(3, 6, 2), [], online=True, online_learn="split")


def test_rounds_without_a_draft_keep_replays_in_step(shallow: Target) -> None:
    """Where a guard let rounds pass without a draft, every replay is still the prompt, the
    answer so far and a draft.
    """

    class Every(Guard):
        """Drafts in every second round."""

        turn = 0

        def should_draft(self) -> bool:
            self.turn += 1
            return self.turn % 2 == 0

        def record_round(
            self, drafted: bool, tokens: float, seconds: float, proposed: bool
        ) -> None: ...

    drafter = make_drafter(shallow).eval()
    recorder = DraftRecorder(Chain(3))
    guard: Any = Every()
    session = Session(shallow, Greedy(), drafter, recorder, changes=(guard,))
    (generation,) = session.decode([[5, 900, 71, 4]], LIMIT, ignore_eos=True)
    replays = select_replays(generation, recorder.rounds[0], 9, Random(0))
    assert len(replays) > 2
    for replay in replays:
        text = replay.example.tokens[:-3]
        assert (
            replay.example.tokens[-3:]
            == decode(drafter.model, [text], Greedy(), 3, ignore_eos=True)[0].output
        )


@pytest.mark.parametrize(("key", "value"), [("online_lr", 0.0), ("online_every", 0)])
def test_bad_settings_are_refused(key: str, value: Any) -> None:
    """A setting out of range is refused under its own key."""
    with pytest.raises(UserError, match=rf"eval\.{key}={value}"):
        build_evaluation(**{key: value})


def test_a_drafter_without_weights_is_refused(shallow: Target, tmp_path: Path) -> None:
    """N-gram lookup has nothing to learn with."""
    with pytest.raises(UserError, match=r"eval\.online: this drafter has no weights"):
        build_evaluation(limit=1, online=True).score(
            Candidate(shallow, Ngram(shallow), Chain(2), Greedy(), SETTING), tmp_path
        )


def test_learning_and_a_sweep_exclude_each_other() -> None:
    """A sweep scores one drafter over many trees, so it can't change on the way."""
    with pytest.raises(UserError, match=r"eval\.(online|sweep)"):
        build_evaluation(limit=1, online=True, sweep="tree")


# The command


SHORT = [
    "eval.max_new_tokens=12",
    "eval.baselines=[]",
    "eval.oracle=false",
    "eval.report=false",
    "eval.repeats=1",
]


@pytest.fixture(scope="module")
def learned_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run whose drafter then learnt while it was scored."""
    run = tmp_path_factory.mktemp("runs") / "gkd"
    argv = sys.argv
    try:
        dispatch_command(
            [
                "train",
                "recipe=gkd",
                "target=tiny",
                "drafter.num_layers=2",
                "data.limit=12",
                "data.max_length=64",
                "data.held_out=0",
                "source=generated",
                "source.max_new_tokens=8",
                "trainer.max_steps=2",
                "eval=none",
                f"run={run}",
            ]
        )
        dispatch_command(
            [
                "eval",
                f"run={run}",
                "eval.online=true",
                "eval.online_every=2",
                "eval.online_lr=1e-3",
                "eval.limit=3",
                "eval.name=learnt",
                *SHORT,
            ]
        )
    finally:
        sys.argv = argv
    return run


@pytest.mark.slow
def test_the_learned_drafter_is_saved_and_can_be_scored(
    learned_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """eval/NAME/drafter holds other weights than the run's drafter, and eval run=RUN/eval/NAME
    scores it losslessly.
    """
    before, after = (
        load_file(folder / "drafter" / "model.safetensors")
        for folder in (learned_run, learned_run / "eval" / "learnt")
    )
    assert before.keys() == after.keys() and not are_equal(before, after)
    summary = json.loads((learned_run / "eval" / "learnt" / "summary.json").read_text())
    assert (
        summary["online"]["updates"] >= 1
        and (learned_run / "eval" / "learnt" / "online.svg").exists()
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    dispatch_command(
        [
            "eval",
            f"run={learned_run / 'eval' / 'learnt'}",
            "eval.limit=2",
            "eval.name=again",
            *SHORT,
        ]
    )
    again = json.loads(
        (learned_run / "eval" / "learnt" / "eval" / "again" / "summary.json").read_text()
    )
    assert again["lossless"]["identical"] == again["lossless"]["checked"] > 0
    assert (learned_run / "eval" / "learnt" / "summary.json").exists()
